"""Accept with probability min(1, q / p): p and q swapped.

Papers disagree on which of the two letters is the target's. What the draft likes too much is then always
accepted, and what it likes too little is refused. A draft equal to the target hides it.
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


class AcceptRatioInverted(RejectionSampling):
    """Swap the ratio."""

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a token while the coin stays below q / p."""
        p_draft, q_draft = judged(p, proposal)
        return keep_while(proposal, coins * p_draft < q_draft)


def alter(strategy: Strategy) -> Strategy:
    """Break the accept test of a strategy."""
    return plant(strategy, AcceptRatioInverted)
