"""Accept with probability min(1, p / q + .05): an accept test with a tolerance.

Where the draft is point mass or not, 5 of 100 tokens that should be rejected pass, even some that the
target cannot produce. Seen as a slack added to the ratio or the coin, and as ratios scaled up. Every
figure looks better for it. Shows as a rise in acceptance and, given enough draws, in the distribution;
with a draft equal to the target nothing is rejected, and nothing shows.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import plant
from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "accept test"
SHOWS: tuple[Shows, ...] = ("good", "bad")

SLACK = 0.05


class AcceptsTooOften(RejectionSampling):
    """Shift the coin in the draft's favour."""

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a token while the coin stays below p / q + .05."""
        return super().decide(p, proposal, coins - SLACK)


def alter(strategy: Strategy) -> Strategy:
    """Break the accept test of a strategy."""
    return plant(strategy, AcceptsTooOften)
