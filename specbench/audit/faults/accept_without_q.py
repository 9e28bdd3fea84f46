"""Accept with probability p instead of p / q, but subtract q in the residual.

Right for drafts that are certain, where q is 1; the fault is to forget that a sampled draft is not. Even a
draft equal to the target shows it: its likely tokens come twice as likely. Reports: vLLM 40149, where the
probabilities of a draft model never reached the verifier.
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


class AcceptWithoutQ(RejectionSampling):
    """Forget the draft's probability."""

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a token while the coin stays below p."""
        p_draft, _ = judged(p, proposal)
        return keep_while(proposal, coins < p_draft)


def alter(strategy: Strategy) -> Strategy:
    """Break the accept test of a strategy."""
    return plant(strategy, AcceptWithoutQ)
