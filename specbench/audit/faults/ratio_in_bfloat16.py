"""Compute the accept ratio with q rounded to bfloat16.

Off by up to .4 %, up or down with the last bits of q: far below what samples of a usual size can tell.
Reports: DeepSpec 31, the other way round.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import judged, keep_while, plant
from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "numerics"
SHOWS: tuple[Shows, ...] = ("unit tests",)


class RatioInBfloat16(RejectionSampling):
    """Round q before it is compared."""

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a token while the coin stays below p over the rounded q."""
        p_draft, q_draft = judged(p, proposal)
        return keep_while(proposal, coins * q_draft.bfloat16().to(q_draft.dtype) < p_draft)


def alter(strategy: Strategy) -> Strategy:
    """Round q in the ratio of a strategy."""
    return plant(strategy, RatioInBfloat16)
