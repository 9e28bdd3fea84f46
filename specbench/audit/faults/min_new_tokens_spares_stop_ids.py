"""Let min_new_tokens forbid the EOS, and not the request's own stop ids.

The list of what may not come yet is made once, from the model's configuration. Reports: vLLM 32642, which
brought the least length to verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.processing import SamplingTensors
from specbench.runtime.loop import Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "stop and length"
SHOWS: tuple[Shows, ...] = ("contract",)


class MinNewTokensSparesStopIds(StepLoop):
    """Know of one kind of end."""

    def sampling_of(self, rows: Sequence[Row]) -> SamplingTensors:
        """Return parameters whose ends are the model's."""
        ends = tuple(tuple(sorted(row.eos_ids)) for row in rows)
        return replace(super().sampling_of(rows), ends=ends)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy stop early at stop ids."""
    return plant(strategy, MinNewTokensSparesStopIds)
