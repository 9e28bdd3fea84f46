"""Let every row of a batch end at an EOS, or not, as the first one does.

Each request is right alone, and so is a batch of requests that agree.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.commit import Committed, Limits, commit
from specbench.runtime.loop import Decision, Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "batch"
SHOWS: tuple[Shows, ...] = ("contract",)


class IgnoreEosOfRow0(StepLoop):
    """Read a flag of the batch."""

    def emit(self, row: Row, decision: Decision) -> Committed:
        """Commit with the first row's EOS ids."""
        limits = Limits(row.remaining, self.active[0].eos_ids, row.stop_ids, row.stop_checker)
        return commit(decision.tokens, decision.next_token, limits)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy take one flag for all rows."""
    return plant(strategy, IgnoreEosOfRow0)
