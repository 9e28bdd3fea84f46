"""Emit as much as a round gives, and look at max_new_tokens afterwards.

Outputs are up to k tokens too long. Reports: SGLang 33045, on chunks that extend beyond the budget.
"""

from __future__ import annotations

from dataclasses import replace

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.commit import Committed, Limits, commit
from specbench.runtime.loop import Decision, Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "stop and length"
SHOWS: tuple[Shows, ...] = ("contract", "identities")


class BudgetOverrunByRun(StepLoop):
    """Count the budget in rounds."""

    def _draft_limits(self) -> list[int]:
        """Draft as if there were a round's worth of budget left."""
        most = self.strategy.max_draft
        for row in self.active:
            row.limit += most
        limits = super()._draft_limits()
        for row in self.active:
            row.limit -= most
        return limits

    def emit(self, row: Row, decision: Decision) -> Committed:
        """Emit the whole round, then see whether the budget is spent."""
        beyond = row.remaining + len(decision.tokens)
        limits = Limits(beyond, row.eos_ids, row.stop_ids, row.stop_checker)
        result = commit(decision.tokens, decision.next_token, limits)
        spent = result.ended_by == "none" and len(result.tokens) >= row.remaining
        return replace(result, ended_by="budget") if spent else result


def alter(strategy: Strategy) -> Strategy:
    """Let the runs of a strategy overrun the budget."""
    return plant(strategy, BudgetOverrunByRun)
