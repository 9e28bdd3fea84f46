"""Apply min-p to the bonus row only.

Drafted places are judged with their whole tail. Reports: vLLM 42802 and SGLang 10617.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import OnBonusOnly, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters",)


class MinPOnBonusOnly(OnBonusOnly):
    """Leave min-p out of the rows that judge drafts."""

    parameter = "min_p"


def alter(strategy: Strategy) -> Strategy:
    """Take min-p out of the rows that judge drafts."""
    return plant(strategy, MinPOnBonusOnly)
