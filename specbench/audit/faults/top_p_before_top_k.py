"""Take the nucleus before the k most likely tokens, in the verification.

Ordinary decoding takes them in the other order, so the nucleus is one of the k tokens renormalised: smaller.
Engines differ in the order, each rightly; to differ within one is the fault. Shows where a request has both.
"""

from __future__ import annotations

from dataclasses import replace

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import WrongParameters, plant
from specbench.decoding.processing import SamplingTensors
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters",)


class TopPBeforeTopK(WrongParameters):
    """Swap the two in the verification."""

    parameter = "top_p"

    def wrong(self, sampling: SamplingTensors) -> SamplingTensors:
        """Return parameters that are applied in the other order."""
        swapped = {"top_k": "top_p", "top_p": "top_k"}
        return replace(sampling, order=tuple(swapped.get(name, name) for name in sampling.order))


def alter(strategy: Strategy) -> Strategy:
    """Swap top-k and top-p in the verification."""
    return plant(strategy, TopPBeforeTopK)
