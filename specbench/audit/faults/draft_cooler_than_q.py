"""Draft at .8 times the temperature that q is computed at.

A draft with a temperature of its own is fine, as long as q has it too.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._drafters import FalseClaim, plant_in_models
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "proposal q"
SHOWS: tuple[Shows, ...] = ("self", "good", "bad", "proposals")

COOLING = 0.8


class DraftCoolerThanQ(FalseClaim):
    """Cool what is drawn from."""

    def bend(self, logits: Tensor) -> Tensor:
        """Return logits of a lower temperature."""
        return logits / COOLING


def alter(strategy: Strategy) -> Strategy:
    """Cool the draft of a model, not its q."""
    return plant_in_models(strategy, DraftCoolerThanQ)
