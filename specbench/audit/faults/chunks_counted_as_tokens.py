"""Count every chunk as one token.

What is then called the time between tokens is the time between rounds.
"""

from __future__ import annotations

from dataclasses import replace

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.records import FinishReason
from specbench.runtime.events import Finished
from specbench.runtime.loop import Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "metrics"
SHOWS: tuple[Shows, ...] = ("contract", "identities")


class ChunksCountedAsTokens(StepLoop):
    """Forget how many tokens a round gave."""

    def _close(self, row: Row, reason: FinishReason) -> Finished:
        """Report chunks of one token each."""
        finished = super()._close(row, reason)
        sizes = (1,) * len(finished.record.chunk_sizes)
        return Finished(replace(finished.record, chunk_sizes=sizes))


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy count chunks."""
    return plant(strategy, ChunksCountedAsTokens)
