"""Accept every draft token, as a verifier does that compares nothing.

It replaces whatever lossless rule a strategy has. Reports: transformers 28508, whose test of the number of
matches always held.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "accept test"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class AcceptAll(RejectionSampling):
    """Never reject."""

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Accept all that was offered."""
        del p, coins
        return proposal.counts, torch.zeros_like(proposal.counts, dtype=torch.bool)


def alter(strategy: Strategy) -> Strategy:
    """Break the accept test of a strategy; one that declares itself lossy stays as it is."""
    if strategy.drafter is None and not isinstance(strategy.rule, RejectionSampling):
        return strategy
    return replace(strategy, rule=AcceptAll()) if strategy.rule.lossless else strategy
