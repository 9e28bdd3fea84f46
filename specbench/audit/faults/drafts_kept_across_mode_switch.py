"""Keep a draft that was made before the grammar was switched on.

Where reasoning ends and the answer begins, the tokens drafted before go to the verification unchecked. Here
the first draft of every request is one of those: made and judged without the grammar. Reports: vLLM 36138,
44993 and 31858.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._drafters import WrappedDrafter
from specbench.decoding.verification import Proposal
from specbench.runtime.grammar import Matcher
from specbench.runtime.loop import StepLoop
from specbench.runtime.protocols import DraftContext, Drafter, Strategy

CLASS: FaultClass = "grammar"
SHOWS: tuple[Shows, ...] = ("contract",)


class WithoutGrammar(WrappedDrafter):
    """A drafter that does not know of the grammar yet."""

    def propose(self, context: DraftContext) -> Proposal:
        """Draft freely."""
        return self.inner.propose(replace(context, matchers=None))


class DraftsKeptAcrossModeSwitch(StepLoop):
    """Switch the grammar on one round too late."""

    def grammar_masks(
        self, matcher: Matcher, nodes: Sequence[int], parents: Sequence[int]
    ) -> tuple[list[int], Tensor]:
        """Allow everything in the first window with a draft, whose request has only its first token yet."""
        kept, masks = super().grammar_masks(matcher, nodes, parents)
        if not nodes or matcher.length != 1:
            return kept, masks
        return list(range(len(nodes))), torch.full_like(masks, -1)


def alter(strategy: Strategy) -> Strategy:
    """Let the first draft of every request go unchecked."""
    if strategy.drafter is None:
        return strategy
    drafter = cast(Drafter, WithoutGrammar(strategy.drafter))
    return replace(strategy, drafter=drafter, loop=DraftsKeptAcrossModeSwitch)
