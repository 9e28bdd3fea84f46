"""Map drafted ids one too low, but not their q.

A map from the draft's ids to the target's that holds offsets, read as if it held ids, or the other way
round. What is offered was not drawn from the q beside it. Reports: verl-SpeCo 67, EAGLE 222 and
NeMo Automodel 2447.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._drafters import WrappedDrafter, plant
from specbench.decoding.verification import Proposal
from specbench.runtime.protocols import DraftContext, Strategy

CLASS: FaultClass = "vocabulary"
SHOWS: tuple[Shows, ...] = ("self", "good", "bad", "proposals")


class DraftIdsOffByOne(WrappedDrafter):
    """Translate tokens, not laws."""

    def propose(self, context: DraftContext) -> Proposal:
        """Offer the id below each drafted one, with the law of the drafted one."""
        proposal = self.inner.propose(context)
        return replace(proposal, tokens=(proposal.tokens - 1).clamp(min=0))

    def commit(self, accepted: Sequence[int], features: dict[int, Tensor]) -> None:
        """Let the draft read what was kept afresh, for it is not what it drafted."""
        self.inner.commit([0] * len(accepted), features)


def alter(strategy: Strategy) -> Strategy:
    """Translate the drafts of a strategy wrongly."""
    return plant(strategy, DraftIdsOffByOne)
