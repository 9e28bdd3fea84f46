"""After a rejection sample from the draft's q.

The two arguments of the residual swapped, or the draft's row read in place of the target's.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import BrokenResidual, in_form_of, plant
from specbench.decoding.distribution import Distribution
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "residual"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class ResidualFromQ(BrokenResidual):
    """Ask the draft again."""

    def recovered(self, p: Distribution, q: Distribution, drafted: Tensor) -> Distribution:
        """Return q, in the form of p."""
        del drafted
        return in_form_of(p, q)


def alter(strategy: Strategy) -> Strategy:
    """Break the residual of a strategy."""
    return plant(strategy, ResidualFromQ)
