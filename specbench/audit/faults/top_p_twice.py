"""Count top-p twice in the verification.

Of the nucleus, renormalised, a nucleus is taken again.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import CountedTwice, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters",)


class TopPTwice(CountedTwice):
    """Verify with top-p counted twice."""

    parameter = "top_p"


def alter(strategy: Strategy) -> Strategy:
    """Count top-p twice in the verification."""
    return plant(strategy, TopPTwice)
