"""After a rejection sample from p instead of norm(max(p - q, 0)).

With p = [.4, .6] and q = [.8, .2] the probability of token 0 becomes .56 instead of .4.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import plant
from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "residual"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class ResidualFromP(RejectionSampling):
    """Forget that the draft has already had its chance."""

    def next_law(
        self, p: Distribution, proposal: Proposal, accepted: Tensor, rejected: Tensor
    ) -> Distribution:
        """Return p of the row after the accepted run, rejected or not."""
        del proposal, rejected
        return p.rows(accepted)


def alter(strategy: Strategy) -> Strategy:
    """Break the residual of a strategy."""
    return plant(strategy, ResidualFromP)
