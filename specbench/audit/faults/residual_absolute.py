"""After a rejection sample from norm(abs(p - q)).

Where the draft wants too much it gets another chance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import BrokenResidual, plant
from specbench.decoding.distribution import Distribution
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "residual"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class ResidualAbsolute(BrokenResidual):
    """Forget to cut off at 0."""

    def recovered(self, p: Distribution, q: Distribution, drafted: Tensor) -> Distribution:
        """Return weights abs(p - q), or p where the two agree."""
        del drafted
        if p.probs is None:
            return p
        weights = (p.probs - q.to_dense(p.probs.shape[-1])).abs()
        empty = weights.sum(-1, keepdim=True) <= 0
        return Distribution.dense(torch.where(empty, p.probs, weights))


def alter(strategy: Strategy) -> Strategy:
    """Break the residual of a strategy."""
    return plant(strategy, ResidualAbsolute)
