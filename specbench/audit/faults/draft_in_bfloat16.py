"""Draw drafts from logits in bfloat16, with q in float32.

The token was not drawn from the q that judges it. The distance is of the order of 1e-3, far below what
samples of a usual size can tell; a greater temperature or flat logits hide it further. Reports: DeepSpec 31.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._drafters import FalseClaim, plant_in_models
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "numerics"
SHOWS: tuple[Shows, ...] = ("unit tests",)


class DraftInBfloat16(FalseClaim):
    """Round what is drawn from."""

    def bend(self, logits: Tensor) -> Tensor:
        """Return logits of 8 bits of precision."""
        return logits.bfloat16().to(logits.dtype)


def alter(strategy: Strategy) -> Strategy:
    """Round the logits that a draft model draws from."""
    return plant_in_models(strategy, DraftInBfloat16)
