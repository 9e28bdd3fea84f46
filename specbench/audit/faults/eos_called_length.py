"""Call it 'length' where an EOS is the last token of the budget.

The length is checked before the end of the text. Reports: SGLang 31569 and 30291.
"""

from __future__ import annotations

from dataclasses import replace

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.commit import Committed
from specbench.runtime.loop import Decision, Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "stop and length"
SHOWS: tuple[Shows, ...] = ("contract",)


class EosCalledLength(StepLoop):
    """Check the budget first."""

    def emit(self, row: Row, decision: Decision) -> Committed:
        """Say 'budget' whenever it is spent."""
        result = super().emit(row, decision)
        spent = result.ended_by == "eos" and len(result.tokens) == row.remaining
        return replace(result, ended_by="budget") if spent else result


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy give the wrong reason for ending."""
    return plant(strategy, EosCalledLength)
