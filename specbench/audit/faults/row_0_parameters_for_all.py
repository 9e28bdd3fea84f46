"""Sample every request of a batch with the parameters of row 0.

Right for requests that ask for the same, and so in most tests. Reports: vLLM 10863, where seeds of some rows
changed what the others got.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.processing import SamplingTensors
from specbench.runtime.loop import Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "batch"
SHOWS: tuple[Shows, ...] = ("contract",)


class Row0ParametersForAll(StepLoop):
    """Read one row, and broadcast."""

    def sampling_of(self, rows: Sequence[Row]) -> SamplingTensors:
        """Return the parameters of the first row, as often as there are rows."""
        params = [rows[0].request.sampling] * len(rows)
        return SamplingTensors.of(params, self.runner.device, eos_ids=self.eos_ids)


def alter(strategy: Strategy) -> Strategy:
    """Let the requests of a strategy share their parameters."""
    return plant(strategy, Row0ParametersForAll)
