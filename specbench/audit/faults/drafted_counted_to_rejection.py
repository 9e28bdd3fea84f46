"""Count a draft up to its first rejection.

What lies behind was drafted and paid for, and is left out of the denominator: the acceptance rate rises,
and the chance of each counted token is right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.records import RoundRecord
from specbench.runtime.loop import Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "metrics"
SHOWS: tuple[Shows, ...] = ("identities",)


class DraftedCountedToRejection(StepLoop):
    """Count what was tested as what was drafted."""

    def describe_round(self, row: Row, *rest: Any) -> RoundRecord:
        """Record a shorter draft."""
        record = super().describe_round(row, *rest)
        if record.draft_parents is not None or record.drafted != record.draft_depth:
            return record
        tested = record.accepted + record.rejected
        return replace(record, drafted=tested, draft_depth=tested)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy count what was tested only."""
    return plant(strategy, DraftedCountedToRejection)
