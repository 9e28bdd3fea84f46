"""What faults of the verification rule share: rejection sampling with one of its two steps replaced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.runtime.protocols import Strategy


def plant(strategy: Strategy, rule: type[RejectionSampling]) -> Strategy:
    """Put a broken form of rejection sampling in its place; strategies with another rule stay as they are."""
    return replace(strategy, rule=rule()) if isinstance(strategy.rule, RejectionSampling) else strategy


def judged(p: Distribution, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Return p and q of the drafted tokens of chains, both `[B, N]`."""
    return p.narrow(0, proposal.num).prob_of(proposal.tokens), proposal.q.prob_of(proposal.tokens)


def keep_while(proposal: Proposal, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Accept each chain as long as `keep` `[B, N]` holds; return what `RejectionSampling.decide` does."""
    offered = torch.arange(proposal.num, device=keep.device) < proposal.counts[:, None]
    accepted = (keep & offered).to(torch.int64).cumprod(1).sum(1)
    return accepted, accepted < proposal.counts


def in_form_of(p: Distribution, other: Distribution) -> Distribution:
    """Return `other` `[B]` dense where p is dense, else as a point mass."""
    if p.probs is not None:
        return Distribution.dense(other.to_dense(p.probs.shape[-1]).to(p.probs.dtype))
    return other if other.probs is None else Distribution.point(other.probs.argmax(-1))


def most_likely(law: Distribution) -> Distribution:
    """Return all mass on the most likely token of each law `[B]`, in the same form."""
    if law.probs is None:
        return law
    return in_form_of(law, Distribution.point(law.probs.argmax(-1)))


class BrokenResidual(RejectionSampling, ABC):
    """Rejection sampling whose recovered token comes from another law."""

    @abstractmethod
    def recovered(self, p: Distribution, q: Distribution, drafted: Tensor) -> Distribution:
        """Return the law after `drafted` `[B]` was rejected, in the form of p; all laws are `[B]`."""

    def next_law(
        self, p: Distribution, proposal: Proposal, accepted: Tensor, rejected: Tensor
    ) -> Distribution:
        """Return the wrong law where a token was rejected, else p."""
        bonus = p.rows(accepted)
        if proposal.num == 0:
            return bonus
        place = accepted.clamp(max=proposal.num - 1)
        drafted = proposal.tokens.gather(1, place[:, None]).squeeze(1)
        return self.recovered(bonus, proposal.q.rows(place), drafted).where(rejected, bonus)


class BrokenBonus(RejectionSampling, ABC):
    """Rejection sampling whose bonus token comes from another law."""

    @abstractmethod
    def bonus(self, p: Distribution, proposal: Proposal, accepted: Tensor) -> Distribution:
        """Return the law after `accepted` `[B]` tokens, all that were offered, in the form of p; `[B]`."""

    def next_law(
        self, p: Distribution, proposal: Proposal, accepted: Tensor, rejected: Tensor
    ) -> Distribution:
        """Return the wrong law where a whole draft was accepted, the right one otherwise."""
        law = super().next_law(p, proposal, accepted, rejected)
        if proposal.num == 0:
            return law
        complete = ~rejected & (accepted > 0)
        return self.bonus(p, proposal, accepted).where(complete, law)
