"""After a step in which a request had no draft, take up the state of before that step.

The step without a draft goes another way through the code, and forgets to advance what the usual way
advances: here the length of the cache. Shows where drafts are missing in some steps: n-grams, adaptive
lengths. Reports: mlx-swift-lm 308 on a snapshot taken at the wrong end of a round.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import RemembersLastRound, plant
from specbench.runtime.loop import Row
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "KV and position state"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class StateStaleAfterIdleStep(RemembersLastRound):
    """Forget to advance where nothing was drafted."""

    def starts(self, rows: Sequence[Row]) -> list[int]:
        """Write over the token of a step without a draft."""
        last = [self.last_of(row) for row in rows]
        return [
            start - int(entry.round > 0 and entry.drafted == 0)
            for start, entry in zip(super().starts(rows), last, strict=True)
        ]


def alter(strategy: Strategy) -> Strategy:
    """Leave the target's cache behind after steps without a draft."""
    return plant(strategy, StateStaleAfterIdleStep)
