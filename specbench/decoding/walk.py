"""Walking from the root of each row's tree to the last accepted node, all rows of a batch at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.decoding.proposal import Proposal


@dataclass(slots=True)
class Walk:
    """Where each row stands in its tree.

    `node` `[B]` is the last accepted node, -1 at the root; `accepted` `[B]` its depth; `path` `[B, N]` the
    nodes on the way to it.
    """

    proposal: Proposal
    index: Tensor
    node: Tensor
    accepted: Tensor
    path: Tensor

    @classmethod
    def start(cls, proposal: Proposal) -> Walk:
        """Stand at the roots, which follow the last committed token."""
        index = torch.arange(proposal.num, device=proposal.tokens.device)
        node = torch.full_like(proposal.counts, -1)
        return cls(proposal, index, node, torch.zeros_like(node), torch.zeros_like(proposal.tokens))

    def children(self) -> Tensor:
        """Return which nodes are offered children of where each row stands, `[B, N]`."""
        assert self.proposal.parents is not None
        offered = self.index < self.proposal.counts[:, None]
        return (self.proposal.parents == self.node[:, None]) & offered

    def descend(self, child: Tensor, moves: Tensor) -> None:
        """Let the rows that move `[B]` step down to a child `[B]`."""
        here = (self.index == self.accepted[:, None]) & moves[:, None]
        self.path = torch.where(here, child[:, None], self.path)
        self.node = torch.where(moves, child, self.node)
        self.accepted = self.accepted + moves


def first(among: Tensor) -> Tensor:
    """Return the first True of each row `[B, N]`, or 0 where there is none, `[B]`."""
    return among.to(torch.int8).argmax(1)
