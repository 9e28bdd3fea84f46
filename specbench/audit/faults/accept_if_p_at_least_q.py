"""Accept exactly the tokens with p >= q: the coin forgotten.

A token that the target likes less than the draft does is then never accepted, though p / q of the time it
should be.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import judged, keep_while, plant
from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "accept test"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class AcceptIfPAtLeastQ(RejectionSampling):
    """Compare instead of throwing a coin."""

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a token while its p is at least its q."""
        del coins
        p_draft, q_draft = judged(p, proposal)
        return keep_while(proposal, p_draft >= q_draft)


def alter(strategy: Strategy) -> Strategy:
    """Break the accept test of a strategy."""
    return plant(strategy, AcceptIfPAtLeastQ)
