"""Count emitted tokens before the stop check.

A run that an EOS or the budget cuts short counts in full. Reports: vLLM 56101.
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


class EmittedBeforeStopCheck(StepLoop):
    """Count what verification gave for what was emitted."""

    def describe_round(self, row: Row, *rest: Any) -> RoundRecord:
        """Count the accepted run and its extra token."""
        record = super().describe_round(row, *rest)
        return replace(record, emitted=record.accepted + 1)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy count tokens that it does not emit."""
    return plant(strategy, EmittedBeforeStopCheck)
