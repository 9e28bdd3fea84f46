"""Apply top-p to the draft only.

The draft is cut to its nucleus, the target is not.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import OnDraftOnly, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters",)


class TopPOnDraftOnly(OnDraftOnly):
    """Verify without top-p."""

    parameter = "top_p"


def alter(strategy: Strategy) -> Strategy:
    """Take top-p out of the verification."""
    return plant(strategy, TopPOnDraftOnly)
