"""Give every row of a batch the logit bias of the first.

A batch of requests with one set of parameters hides it. Reports: vLLM 55562, a row that was counted for a
request that had none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.processing import SamplingTensors
from specbench.runtime.loop import Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "batch"
SHOWS: tuple[Shows, ...] = ("contract",)


class BiasOfRow0(StepLoop):
    """Look up one row's biases."""

    def sampling_of(self, rows: Sequence[Row]) -> SamplingTensors:
        """Return parameters with the first row's biases in all rows."""
        bias = rows[0].request.sampling.logit_bias
        params = [replace(row.request.sampling, logit_bias=bias) for row in rows]
        return SamplingTensors.of(params, self.runner.device, eos_ids=self.eos_ids)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy bias all rows alike."""
    return plant(strategy, BiasOfRow0)
