"""Apply presence and frequency penalties to the bonus row only.

Reports: vLLM 18902, a frequency penalty without effect or warning.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import OnBonusOnly, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters", "contract")


class PresencePenaltyOnBonusOnly(OnBonusOnly):
    """Leave presence and frequency penalties out of the rows that judge drafts."""

    parameter = "presence"


def alter(strategy: Strategy) -> Strategy:
    """Take presence and frequency penalties out of the rows that judge drafts."""
    return plant(strategy, PresencePenaltyOnBonusOnly)
