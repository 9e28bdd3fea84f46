"""Leave the entries of an accepted tree path where the tree had them.

What follows attends to whichever nodes lie at the beginning of the tree, its rejected branches among them.
Trees only; a path of first children hides it.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.runtime.loop import Decision, StepLoop, Window
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "KV and position state"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class TreePathNotCompacted(StepLoop):
    """Forget to move entries."""

    def compact(self, window: Window, decided: Sequence[Decision]) -> None:
        """Leave the cache as the verification left it."""


def alter(strategy: Strategy) -> Strategy:
    """Leave the trees of a strategy scattered; one that drafts chains stays as it is."""
    return strategy if not strategy.max_nodes else plant(strategy, TreePathNotCompacted)
