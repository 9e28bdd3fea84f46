"""Accept with probability .9 p / q, at most .9: the ratio scaled down.

Rejecting too often is no safe side: the residual then comes too often, and it lacks what the draft likes.
A draft equal to the target leaves a residual of nothing, for which p stands in, and shows nothing.
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

SCALE = 0.9


class AcceptRatioLowered(RejectionSampling):
    """Scale the ratio."""

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a token while the coin stays below .9 p / q."""
        return super().decide(p, proposal, coins / SCALE)


def alter(strategy: Strategy) -> Strategy:
    """Break the accept test of a strategy."""
    return plant(strategy, AcceptRatioLowered)
