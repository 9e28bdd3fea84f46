"""Judge every token of a round with the coin of the first one.

Right at each position alone, so counts by position see nothing: a low coin accepts the whole run, a high one
ends it at once. Shows in whole continuations, with drafts whose tokens are in doubt.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import plant
from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.decoding.walk import Walk
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "accept test"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class CoinReusedInRound(RejectionSampling):
    """Spread the first coin over the round."""

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Judge all tokens with one number."""
        return super().decide(p, proposal, coins[:, :1].expand_as(coins))

    def walk(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Walk, Distribution]:
        """Judge all nodes with one number."""
        return super().walk(p, proposal, coins[:, :1].expand_as(coins))


def alter(strategy: Strategy) -> Strategy:
    """Break the accept test of a strategy."""
    return plant(strategy, CoinReusedInRound)
