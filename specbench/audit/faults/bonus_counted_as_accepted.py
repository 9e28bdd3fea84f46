"""Count the bonus token as an accepted draft token.

More is accepted than was drafted, and rates exceed 1. Reports: SGLang 11572, vLLM 17908 and 2658.
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


class BonusCountedAsAccepted(StepLoop):
    """Count emitted tokens for accepted ones."""

    def describe_round(self, row: Row, *rest: Any) -> RoundRecord:
        """Add one to what a whole draft was accepted of."""
        record = super().describe_round(row, *rest)
        complete = record.drafted > 0 and not record.rejected
        return replace(record, accepted=record.accepted + complete)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy count its bonus tokens as accepted."""
    return plant(strategy, BonusCountedAsAccepted)
