"""The contract between drafters, verification rules and the loop: what is offered, what is answered.

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

from specbench.decoding.distribution import Distribution
from specbench.decoding.padding import padded
from specbench.decoding.random_numbers import RoundRandom


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
        if not any(nodes):
            return cls.empty(len(nodes), device)
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
    """A verification rule.

    `lossless` is the claim that the audit holds it to; rules that do not judge trees read chains only.
    """

    name: str
    lossless: bool
    judges_trees: bool

    def verify(self, p: Distribution, proposal: Proposal, random: RoundRandom) -> Acceptance:
        """Judge a proposal against the target's distributions p `[B, N + 1]`."""
        ...


def require_chain(proposal: Proposal, rule: Rule) -> None:
    """Raise ValueError if a rule that reads chains is given a tree."""
    if proposal.parents is not None:
        raise ValueError(f"the rule '{rule.name}' verifies chains; the proposal is a tree")


def chain_path(proposal: Proposal) -> Tensor:
    """Return the path along a chain, `[B, N]`: node i is the i-th."""
    return torch.arange(proposal.num, device=proposal.tokens.device).expand(len(proposal.counts), -1)
