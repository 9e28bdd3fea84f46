"""Accept a draft token when p exceeds .3, whatever q: an undeclared threshold.

Likely tokens are never refused, unlikely ones never accepted. Engines offer this as a lossy option; the
fault is to call it lossless. Shows whatever the draft.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import judged, keep_while, plant
from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "accept test"
SHOWS: tuple[Shows, ...] = ("self", "good", "bad")

THRESHOLD = 0.3


class AcceptAboveThreshold(RejectionSampling):
    """Judge by p alone."""

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a token while its p exceeds .3."""
        del coins
        p_draft, _ = judged(p, proposal)
        return keep_while(proposal, p_draft > THRESHOLD)


def alter(strategy: Strategy) -> Strategy:
    """Break the accept test of a strategy."""
    return plant(strategy, AcceptAboveThreshold)
