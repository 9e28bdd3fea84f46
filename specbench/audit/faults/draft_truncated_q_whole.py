"""Draft among the two most likely tokens, and offer the whole law as q.

A top-k of the draft's own, for speed, that the verifier never hears of. Reports: transformers 47932.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._drafters import FalseClaim, plant_in_models
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "proposal q"
SHOWS: tuple[Shows, ...] = ("self", "good", "bad", "proposals")

KEPT = 2
LOWERED = 1e4


class DraftTruncatedQWhole(FalseClaim):
    """Cut what is drawn from."""

    def bend(self, logits: Tensor) -> Tensor:
        """Return logits of which all but the two largest are hopeless."""
        edge = logits.topk(KEPT, dim=-1).values[..., -1:]
        return torch.where(logits < edge, logits - LOWERED, logits)


def alter(strategy: Strategy) -> Strategy:
    """Truncate the draft of a model, not its q."""
    return plant_in_models(strategy, DraftTruncatedQWhole)
