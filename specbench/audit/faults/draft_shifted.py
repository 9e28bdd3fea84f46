"""Offer the draft shifted by one position: token i + 1 where token i belongs (FAULTS.md, position state).

The first drafted token is dropped before anyone looks at it, and each of the others goes one place up
with the law it was drawn from, so q stays true and the output stays the target's: the audit must pass.
Only acceptance suffers, which is for the gate to notice. Of the class of draft caches that are not rolled
back and hidden states paired with the wrong token, reported as "speculation works, but is slow".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor

from specbench.decoding.verification import Proposal
from specbench.runtime.protocols import DraftContext, Drafter, DraftMemory, Strategy


class ShiftedDrafter:
    """A drafter whose chains lost their first token on the way.

    The inner drafter is told that nothing of its own chain was kept, so that it reads what was committed
    afresh: its state stays right, only its offer is not.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.needs_features = inner.needs_features
        self.shares_target_cache = inner.shares_target_cache
        self.runners = inner.runners

    def prefill(self, first_row: int, prompts: Sequence[list[int]], features: dict[int, Tensor]) -> None:
        """Take in new prompts."""
        self.inner.prefill(first_row, prompts, features)

    def propose(self, context: DraftContext) -> Proposal:
        """Offer all but the first token of each chain, one place too early."""
        proposal = self.inner.propose(context)
        if proposal.num == 0:
            return proposal
        if proposal.parents is not None:
            raise ValueError("this fault shifts chains; the proposal is a tree")
        return Proposal.chains(
            proposal.tokens[:, 1:],
            [max(offered - 1, 0) for offered in proposal.offered],
            proposal.q.narrow(1, proposal.num - 1),
        )

    def commit(self, accepted: Sequence[int], features: dict[int, Tensor]) -> None:
        """Tell the inner drafter that none of its chain was kept."""
        self.inner.commit([0] * len(accepted), features)

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Copy a row."""
        self.inner.fork(source, targets)

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        self.inner.release(rows)

    def memory(self) -> DraftMemory:
        """Report the inner drafter's."""
        return self.inner.memory()


def alter(strategy: Strategy) -> Strategy:
    """Shift what a strategy drafts; one that does not draft stays as it is."""
    if strategy.drafter is None:
        return replace(strategy)
    # The protocol's class attributes are this object's own, since they are those of whatever it wraps.
    return replace(strategy, drafter=cast(Drafter, ShiftedDrafter(strategy.drafter)))
