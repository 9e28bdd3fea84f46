"""After a rejection take the most likely token of the residual instead of a sample.

Repairs look like greedy decoding inside of sampled text.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import BrokenResidual, most_likely, plant
from specbench.decoding.distribution import Distribution, residual
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "residual"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class ResidualArgmax(BrokenResidual):
    """Forget to sample."""

    def recovered(self, p: Distribution, q: Distribution, drafted: Tensor) -> Distribution:
        """Return all mass on the residual's most likely token."""
        del drafted
        return most_likely(residual(p, q))


def alter(strategy: Strategy) -> Strategy:
    """Break the residual of a strategy."""
    return plant(strategy, ResidualArgmax)
