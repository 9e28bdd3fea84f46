"""End at an EOS in mid-run, but emit the rest of the accepted run after it.

The end is found, and the text is not cut there. Reports: SGLang 33758 and 31599.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.commit import Committed
from specbench.runtime.loop import Decision, Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "stop and length"
SHOWS: tuple[Shows, ...] = ("contract",)


class TextAfterEos(StepLoop):
    """Cut after the round instead of after the token."""

    def emit(self, row: Row, decision: Decision) -> Committed:
        """Emit the whole run where the end lies inside of it."""
        result = super().emit(row, decision)
        if result.ended_by == "eos" and len(result.tokens) < len(decision.tokens):
            return Committed(decision.tokens[: row.remaining], "eos")
        return result


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy emit what was accepted after an EOS."""
    return plant(strategy, TextAfterEos)
