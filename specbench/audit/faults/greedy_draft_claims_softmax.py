"""Draft greedily, and offer the softmax as q.

The theorem wants q to be what the token was drawn from, and that is the argmax, with q = 1. Reports:
transformers 32867, whose draft was always greedy, and 47932.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._drafters import FalseClaim, plant_in_models
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "proposal q"
SHOWS: tuple[Shows, ...] = ("self", "good", "bad", "proposals")

SHARPNESS = 1e4


class GreedyDraftClaimsSoftmax(FalseClaim):
    """Sharpen the logits until only the largest counts."""

    def bend(self, logits: Tensor) -> Tensor:
        """Return logits whose softmax is certain."""
        return logits * SHARPNESS


def alter(strategy: Strategy) -> Strategy:
    """Make the draft of a model greedy, not its q."""
    return plant_in_models(strategy, GreedyDraftClaimsSoftmax)
