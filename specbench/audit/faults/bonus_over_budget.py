"""Emit the bonus token although an accepted run has used up the budget.

Drafts may be as long as what is left, with no place kept for the token that follows them. Reports: SGLang
33758, where what was sampled beyond the end leaked into the output.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.commit import Committed
from specbench.runtime.loop import Decision, Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "bonus row"
SHOWS: tuple[Shows, ...] = ("contract", "identities")


class BonusOverBudget(StepLoop):
    """Keep no room for the extra token, and emit it all the same."""

    def _draft_limits(self) -> list[int]:
        """Let a draft be as long as the budget."""
        for row in self.active:
            row.limit += 1
        limits = super()._draft_limits()
        for row in self.active:
            row.limit -= 1
        return limits

    def emit(self, row: Row, decision: Decision) -> Committed:
        """Add the bonus token to a run that fills the budget."""
        result = super().emit(row, decision)
        filled = len(result.tokens) == len(decision.tokens) == row.remaining
        if filled and not decision.rejected and result.ended_by == "budget":
            return Committed([*result.tokens, decision.next_token], "budget")
        return result


def alter(strategy: Strategy) -> Strategy:
    """Let the bonus token of a strategy overrun the budget."""
    return plant(strategy, BonusOverBudget)
