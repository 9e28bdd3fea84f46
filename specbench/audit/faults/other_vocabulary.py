"""Draft with a vocabulary of the same size, but of other tokens.

Sizes agree, so nobody complains; token 5 of the draft is not token 5 of the target. Tokens and q are wrong
alike, so the output stays right and only acceptance suffers. Here the ids run backwards. Reports: EAGLE 258
on tokenizers that do not belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._drafters import WrappedDrafter, plant_in_models
from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal
from specbench.runtime.protocols import DraftContext, Strategy

CLASS: FaultClass = "vocabulary"
SHOWS: tuple[Shows, ...] = ()


class OtherVocabulary(WrappedDrafter):
    """Reverse the ids of drafts and of their laws."""

    def propose(self, context: DraftContext) -> Proposal:
        """Offer a chain of other tokens."""
        proposal = self.inner.propose(context)
        if proposal.num == 0:
            return proposal
        vocabulary: int = cast(Any, self.inner).vocabulary.target
        if proposal.q.probs is not None:
            q = Distribution.dense(proposal.q.probs.flip(-1))
        else:
            assert proposal.q.tokens is not None
            q = Distribution.point(vocabulary - 1 - proposal.q.tokens)
        return replace(proposal, tokens=vocabulary - 1 - proposal.tokens, q=q)

    def commit(self, accepted: Sequence[int], features: dict[int, Tensor]) -> None:
        """Let the draft read what was kept afresh, for it is not what it drafted."""
        self.inner.commit([0] * len(accepted), features)


def alter(strategy: Strategy) -> Strategy:
    """Give a draft model other tokens."""
    return plant_in_models(strategy, OtherVocabulary)
