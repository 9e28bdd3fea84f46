"""Zero the draft token in the row of p itself, before the accept test reads it.

The residual of a certain draft is p with one entry zeroed; done in place and too early, p(d) is 0 when the
coin is thrown, nothing is ever accepted, and what the draft takes away never comes back. A draft equal to
the target leaves a residual of nothing, for which p stands in, and shows nothing.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import judged, keep_while, plant
from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "residual"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class ResidualRowZeroed(RejectionSampling):
    """Overwrite what is still to be read."""

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Find p(d) = 0 everywhere."""
        p_draft, q_draft = judged(p, proposal)
        zeroed = p_draft.zero_()
        return keep_while(proposal, coins * q_draft < zeroed)


def alter(strategy: Strategy) -> Strategy:
    """Break the residual of a strategy."""
    return plant(strategy, ResidualRowZeroed)
