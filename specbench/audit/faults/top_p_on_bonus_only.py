"""Apply top-p to the bonus row only.

Drafted places are judged with their whole tail. Reports: SGLang 31214, whose verification lacked the
kernel for it on one platform.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import OnBonusOnly, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters",)


class TopPOnBonusOnly(OnBonusOnly):
    """Leave top-p out of the rows that judge drafts."""

    parameter = "top_p"


def alter(strategy: Strategy) -> Strategy:
    """Take top-p out of the rows that judge drafts."""
    return plant(strategy, TopPOnBonusOnly)
