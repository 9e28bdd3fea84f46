"""After a rejection sample from p without the rejected token.

Right for a draft that was certain, and written for it; a sampled draft takes chances from other tokens too.
Reports: vLLM 40149, whose draft models went through the code for n-grams.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import BrokenResidual, plant
from specbench.decoding.distribution import Distribution, residual
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "residual"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class ResidualWithoutDraft(BrokenResidual):
    """Take out the rejected token alone."""

    def recovered(self, p: Distribution, q: Distribution, drafted: Tensor) -> Distribution:
        """Return the residual that would be right if q were certain."""
        del q
        return residual(p, Distribution.point(drafted))


def alter(strategy: Strategy) -> Strategy:
    """Break the residual of a strategy."""
    return plant(strategy, ResidualWithoutDraft)
