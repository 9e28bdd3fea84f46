"""Throw a coin that is always 0: whatever the target could say is accepted.

An uninitialised or unfilled buffer of uniforms. At temperature 0 and under top-k it looks right, for what is
impossible is still refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import plant
from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "accept test"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class CoinAlwaysZero(RejectionSampling):
    """Read a buffer of zeros."""

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a token while its p is above 0."""
        return super().decide(p, proposal, torch.zeros_like(coins))


def alter(strategy: Strategy) -> Strategy:
    """Break the accept test of a strategy."""
    return plant(strategy, CoinAlwaysZero)
