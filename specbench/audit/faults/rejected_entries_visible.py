"""After every second rejection leave the rejected token's entry in the cache, in plain sight.

The next token is written one slot too late, and what was rejected is attended to from then on. Reports:
mlx-lm 846, where a cache that cannot be cut kept what was rejected.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import RemembersLastRound, plant
from specbench.runtime.loop import Row
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "KV and position state"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class RejectedEntriesVisible(RemembersLastRound):
    """Cut the cache one entry short of enough."""

    def starts(self, rows: Sequence[Row]) -> list[int]:
        """Step over a rejected entry in every second round."""
        return [
            start + int(self.last_of(row).rejected and row.round % 2 == 0)
            for start, row in zip(super().starts(rows), rows, strict=True)
        ]


def alter(strategy: Strategy) -> Strategy:
    """Leave rejected entries in the target's cache."""
    return plant(strategy, RejectedEntriesVisible)
