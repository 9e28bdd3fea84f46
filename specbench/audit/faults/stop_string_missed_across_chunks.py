"""Look for stop strings in the text of each round by itself.

A string that begins in one round and ends in the next is never found. Reports: SGLang 23802 and vLLM 47616,
two windows of text that did not fit the rounds.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.commit import Committed
from specbench.runtime.loop import Decision, Row, StepLoop
from specbench.runtime.protocols import Strategy
from specbench.runtime.stop_strings import StopStrings

CLASS: FaultClass = "stop and length"
SHOWS: tuple[Shows, ...] = ("contract",)


class StopStringMissedAcrossChunks(StepLoop):
    """Forget the text of the rounds before."""

    def emit(self, row: Row, decision: Decision) -> Committed:
        """Begin with an empty tail."""
        if isinstance(row.stop_checker, StopStrings):
            row.stop_checker.tail = ""
        return super().emit(row, decision)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy miss stop strings across the edge of a round."""
    return plant(strategy, StopStringMissedAcrossChunks)
