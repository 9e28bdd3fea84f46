"""What a drafter offers, what a verification rule answers, and the two lossless rules for chains.

Row alignment: a proposal of N tokens is verified by N + 1 rows of target logits. Row 0 follows the last
committed token and judges the roots; row i + 1 follows node i and judges its children, which in a chain is
node i + 1. The row after the accepted run gives the extra token: the *recovered* token if verification
stopped at a rejection, else the *bonus* token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution, residual
from specbench.decoding.padding import padded
from specbench.decoding.random_numbers import Purpose, RoundRandom


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of a batch.

    `tokens` `[B, N]` int64, of which the first `counts[b]` are offered. `parents` `[B, N]` gives each
    node's parent (-1: the last committed token); None is a chain. Parents come before their children, and
    siblings in the order they were drawn; entries beyond `counts[b]` have any parent. `q` `[B, N]` is the
    law each node was drawn from, given its earlier siblings: never a made-up one. `offered` is `counts` on
    the host.
    """

    tokens: Tensor
    counts: Tensor
    offered: Sequence[int]
    q: Distribution
    parents: Tensor | None = None

    @classmethod
    def empty(cls, batch: int, device: torch.device | str = "cpu") -> Proposal:
        """Offer nothing: ordinary decoding."""
        nothing = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        return cls.chains(nothing, [0] * batch, Distribution.point(nothing))

    @classmethod
    def chains(cls, tokens: Tensor, offered: Sequence[int], q: Distribution) -> Proposal:
        """Offer the first `offered[b]` tokens of each row as a chain."""
        counts = torch.tensor(list(offered), dtype=torch.int64, device=tokens.device)
        return cls(tokens, counts, offered, q)

    @classmethod
    def certain(cls, chains: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Proposal:
        """Offer chains that were not drawn at random (n-grams): q is the point mass on each token."""
        tokens = padded(chains, device)
        return cls.chains(tokens, [len(chain) for chain in chains], Distribution.point(tokens))

    @classmethod
    def trees(cls, tokens: Tensor, parents: Tensor, offered: Sequence[int], q: Distribution) -> Proposal:
        """Offer the first `offered[b]` nodes of each row as a tree; rows may have different trees."""
        counts = torch.tensor(list(offered), dtype=torch.int64, device=tokens.device)
        return cls(tokens, counts, offered, q, parents)

    @classmethod
    def certain_trees(
        cls,
        nodes: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> Proposal:
        """Offer trees that were not drawn at random: q is the point mass on each node's token."""
        tokens = padded(nodes, device)
        return cls.trees(
            tokens, padded(parents, device), [len(row) for row in nodes], Distribution.point(tokens)
        )

    @property
    def num(self) -> int:
        """Return N, the width of the proposal."""
        return self.tokens.shape[1]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What verification decided.

    `accepted` `[B]`; `path` `[B, N]`, the node indices of the accepted run (its first `accepted`
    entries count); `next_token` `[B]`, recovered or bonus; `rejected` `[B]`, whether it stopped at a
    rejection.
    """

    accepted: Tensor
    path: Tensor
    next_token: Tensor
    rejected: Tensor


class Rule(Protocol):
    """A verification rule. `lossless` is the claim that the audit holds it to."""

    name: str
    lossless: bool

    def verify(self, p: Distribution, proposal: Proposal, random: RoundRandom) -> Acceptance:
        """Judge a proposal against the target's distributions p `[B, N + 1]`."""
        ...


class RejectionSampling:
    """Token-wise speculative sampling: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318.

    Draft token d is kept with probability min(1, p(d) / q(d)); at the first one that is not, the
    recovered token comes from norm(max(p - q, 0)). Both papers write p for the target and q for the draft
    in this sense (Chen et al. swap them). Coins and samples are keyed by the round: a look-ahead rule may
    decide the same position twice, and must not use one number twice.
    """

    name = "rejection"
    lossless = True

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many tokens are accepted and whether a rejection ended the run, both `[B]`."""
        _require_chain(proposal)
        num = proposal.num
        p_draft = p.narrow(0, num).prob_of(proposal.tokens)
        q_draft = proposal.q.prob_of(proposal.tokens)
        offered = torch.arange(num, device=coins.device) < proposal.counts[:, None]
        keep = (coins * q_draft < p_draft) & offered
        accepted = keep.to(torch.int64).cumprod(1).sum(1)
        return accepted, accepted < proposal.counts

    def next_law(
        self, p: Distribution, proposal: Proposal, accepted: Tensor, rejected: Tensor
    ) -> Distribution:
        """Return the law of the token after the accepted run, `[B]`: residual if rejected, else p."""
        bonus = p.rows(accepted)
        if proposal.num == 0:
            return bonus
        judged = accepted.clamp(max=proposal.num - 1)
        recovered = residual(bonus, proposal.q.rows(judged))
        if bonus.probs is None:
            return recovered  # both are the target's certain token
        assert recovered.probs is not None
        return Distribution.dense(torch.where(rejected[:, None], recovered.probs, bonus.probs))

    def verify(self, p: Distribution, proposal: Proposal, random: RoundRandom) -> Acceptance:
        """Judge a chain; see `Rule.verify`."""
        accepted, rejected = self.decide(p, proposal, random.uniform(Purpose.COIN, proposal.num))
        law = self.next_law(p, proposal, accepted, rejected)
        if law.probs is None:
            next_token = law.sample(accepted)  # certain: no random number is read
        else:
            position = accepted[:, None]
            recovered = random.uniform(Purpose.RESIDUAL, proposal.num + 1).gather(1, position)
            bonus = random.uniform(Purpose.TARGET, proposal.num + 1).gather(1, position)
            next_token = law.sample(torch.where(rejected[:, None], recovered, bonus).squeeze(1))
        return Acceptance(accepted, _chain_path(proposal), next_token, rejected)


class ExactMatch:
    """Sample the target at every row; keep the draft as long as it agrees; emit the target's sample.

    Lossless whatever the draft, and under one seed equal to ordinary decoding token for token, because
    the target's sample is keyed by position alone. Accepts less than rejection sampling: sum of p q
    instead of sum of min(p, q). With no draft it is ordinary decoding.
    """

    name = "exact"
    lossless = True

    def verify(self, p: Distribution, proposal: Proposal, random: RoundRandom) -> Acceptance:
        """Judge a chain; see `Rule.verify`."""
        _require_chain(proposal)
        if p.tokens is not None:
            sampled = p.tokens
        else:
            sampled = p.sample(random.uniform(Purpose.TARGET, proposal.num + 1, by_round=False))
        offered = torch.arange(proposal.num, device=sampled.device) < proposal.counts[:, None]
        keep = (sampled[:, : proposal.num] == proposal.tokens) & offered
        accepted = keep.to(torch.int64).cumprod(1).sum(1)
        next_token = sampled.gather(1, accepted[:, None]).squeeze(1)
        return Acceptance(accepted, _chain_path(proposal), next_token, accepted < proposal.counts)


RULES: dict[str, type[Rule]] = {"rejection": RejectionSampling, "exact": ExactMatch}
"""The rules by the name users type."""


def _require_chain(proposal: Proposal) -> None:
    if proposal.parents is not None:
        raise ValueError("this rule verifies chains; the proposal is a tree")


def _chain_path(proposal: Proposal) -> Tensor:
    return torch.arange(proposal.num, device=proposal.tokens.device).expand(len(proposal.counts), -1)
