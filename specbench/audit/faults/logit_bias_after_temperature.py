"""Add the logit bias to logits that the temperature has divided already, in the verification.

At temperature 1 there is nothing to see, and at 0 a bias of 100 still forces its token.
"""

from __future__ import annotations

from dataclasses import replace

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import WrongParameters, plant
from specbench.decoding.processing import SamplingTensors
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters",)


class LogitBiasAfterTemperature(WrongParameters):
    """Swap two steps."""

    parameter = "bias"

    def wrong(self, sampling: SamplingTensors) -> SamplingTensors:
        """Return biases that the temperature will make as large as they were."""
        rows, tokens, bias = sampling.bias
        temperature = sampling.temperature[rows].clamp_min(1e-6)
        return replace(sampling, bias=(rows, tokens, bias * temperature))


def alter(strategy: Strategy) -> Strategy:
    """Bias after temperature in the verification."""
    return plant(strategy, LogitBiasAfterTemperature)
