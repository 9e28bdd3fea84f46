"""Ask whether the budget is spent before asking where the text ends.

An accepted run that fills the budget is emitted whole and called 'length', though a stop id or string lies
inside of it. One token at a time the order makes no difference. Reports: SGLang 31599.
"""

from __future__ import annotations

from dataclasses import replace

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.commit import Committed, Limits, commit
from specbench.runtime.loop import Decision, Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "stop and length"
SHOWS: tuple[Shows, ...] = ("contract",)


class BudgetCheckedBeforeStop(StepLoop):
    """Let the budget mask a stop."""

    def emit(self, row: Row, decision: Decision) -> Committed:
        """Emit all of a run that fills the budget, whatever stops the request has."""
        limits = Limits(row.remaining, row.eos_ids, row.stop_ids, row.stop_checker)
        if decision.tokens and len(decision.tokens) + 1 >= row.remaining:
            limits = replace(limits, stop_ids=frozenset(), stop_checker=None)
        return commit(decision.tokens, decision.next_token, limits)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy check the budget first."""
    return plant(strategy, BudgetCheckedBeforeStop)
