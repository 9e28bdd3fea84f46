"""Offer the softmax of the raw logits as q, though tokens come from processed ones.

Under top-k q is then too small by the mass that was cut off, the ratio too large, and the residual lacks
mass for tokens that were never drafted. At temperature 1 without truncation nothing shows. Reports:
transformers 47932.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._drafters import FalseClaim, plant_in_models
from specbench.decoding.distribution import Distribution
from specbench.runtime.protocols import DraftContext, Strategy

CLASS: FaultClass = "proposal q"
SHOWS: tuple[Shows, ...] = ("parameters", "proposals")


class QOfRawLogits(FalseClaim):
    """Leave the sampling parameters out of q."""

    def claim(self, logits: Tensor, context: DraftContext, tokens: Tensor) -> Distribution:
        """Return the model's own softmax."""
        del context, tokens
        return Distribution.dense(logits.float().softmax(-1))


def alter(strategy: Strategy) -> Strategy:
    """Leave the q of a draft model unprocessed."""
    return plant_in_models(strategy, QOfRawLogits)
