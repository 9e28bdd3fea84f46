"""Apply the repetition penalty to the bonus row only.

Reports: vLLM 6718, which asks how it could be otherwise.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import OnBonusOnly, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters", "contract")


class RepetitionPenaltyOnBonusOnly(OnBonusOnly):
    """Leave the repetition penalty out of the rows that judge drafts."""

    parameter = "repetition"


def alter(strategy: Strategy) -> Strategy:
    """Take the repetition penalty out of the rows that judge drafts."""
    return plant(strategy, RepetitionPenaltyOnBonusOnly)
