"""Accept with probability min(1, 1.1 p / q): the ratio scaled up.

What a q that sums to less than 1 does, or a p that was renormalised twice. A draft equal to the target is
accepted anyway, and shows nothing.
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

SCALE = 1.1


class AcceptRatioRaised(RejectionSampling):
    """Scale the ratio."""

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a token while the coin stays below 1.1 p / q."""
        return super().decide(p, proposal, coins / SCALE)


def alter(strategy: Strategy) -> Strategy:
    """Break the accept test of a strategy."""
    return plant(strategy, AcceptRatioRaised)
