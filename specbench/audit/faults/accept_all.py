"""Accept every draft token, as a verifier does that compares nothing (FAULTS.md, accept test)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.runtime.protocols import Strategy


class AcceptAll(RejectionSampling):
    """Never reject."""

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Accept all that was offered."""
        del p, coins
        return proposal.counts, torch.zeros_like(proposal.counts, dtype=torch.bool)


def alter(strategy: Strategy) -> Strategy:
    """Break the accept test of a strategy."""
    return replace(strategy, rule=AcceptAll())
