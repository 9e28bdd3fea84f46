"""Throw each coin against the product of the ratios so far.

What block verification reckons with, in the place of a token's own ratio: a likely token makes up for the
unlikely one behind it. Right for the first token, so a draft of one hides it.
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


class AcceptJointRatio(RejectionSampling):
    """Multiply ratios up instead of taking each by itself."""

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Keep token i with the probability min(1, p_1 / q_1 ... p_i / q_i)."""
        p_draft, q_draft = judged(p, proposal)
        return keep_while(proposal, coins * q_draft.cumprod(1) < p_draft.cumprod(1))


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy accept by the joint ratio."""
    return plant(strategy, AcceptJointRatio)
