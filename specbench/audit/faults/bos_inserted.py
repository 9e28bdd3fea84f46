"""Show the draft a beginning-of-sequence token that the target does not see.

The text is tokenised again for the draft, with the special tokens of its own tokenizer. What the draft draws
is offered with the law it was drawn from, so only acceptance suffers. Token 0 stands for BOS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._drafters import WrappedDrafter, plant_in_own_cache
from specbench.decoding.verification import Proposal
from specbench.runtime.protocols import DraftContext, Strategy

CLASS: FaultClass = "vocabulary"
SHOWS: tuple[Shows, ...] = ()

BOS = 0


class BosInserted(WrappedDrafter):
    """Begin every text with another token."""

    def prefill(self, first_row: int, prompts: Sequence[list[int]], features: dict[int, Tensor]) -> None:
        """Take in longer prompts."""
        super().prefill(first_row, [[BOS, *prompt] for prompt in prompts], features)

    def propose(self, context: DraftContext) -> Proposal:
        """Draft what would follow the longer text, where there is room for it."""
        slots = [max(0, slots - 1) for slots in context.slots]
        limits = [min(limit, room) for limit, room in zip(context.limits, slots, strict=True)]
        if not any(limits):
            return Proposal.empty(len(limits), context.random.positions.device)
        longer = replace(
            context,
            tokens=[[BOS, *tokens] for tokens in context.tokens],
            prompts=[length + 1 for length in context.prompts],
            limits=limits,
            slots=slots,
        )
        return self.inner.propose(longer)


def alter(strategy: Strategy) -> Strategy:
    """Put a BOS before what a draft model reads."""
    return plant_in_own_cache(strategy, BosInserted)
