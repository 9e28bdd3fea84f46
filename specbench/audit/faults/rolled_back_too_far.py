"""After a rejection cut the cache one entry too short.

The next token overwrites the last one that was accepted. Reports: mlxcel 994, a count of entries off by two
in a draft's cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import RemembersLastRound, plant
from specbench.runtime.loop import Row
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "KV and position state"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class RolledBackTooFar(RemembersLastRound):
    """Count the rejected token twice."""

    def starts(self, rows: Sequence[Row]) -> list[int]:
        """Step back over an entry that should stay."""
        return [
            max(0, start - int(self.last_of(row).rejected))
            for start, row in zip(super().starts(rows), rows, strict=True)
        ]


def alter(strategy: Strategy) -> Strategy:
    """Cut the target's cache too short."""
    return plant(strategy, RolledBackTooFar)
