"""Apply top-k to the bonus row only.

Drafted tokens beyond the k most likely are accepted, and recovered ones come from the whole vocabulary.
Reports: vLLM 10198.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import OnBonusOnly, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters",)


class TopKOnBonusOnly(OnBonusOnly):
    """Leave top-k out of the rows that judge drafts."""

    parameter = "top_k"


def alter(strategy: Strategy) -> Strategy:
    """Take top-k out of the rows that judge drafts."""
    return plant(strategy, TopKOnBonusOnly)
