"""Mix the number of the request into its seed.

Two calls with the same requests agree, so it looks reproducible. The same request under another number, as
every server gives it, says something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.random_numbers import RoundRandom, stream_keys
from specbench.runtime.loop import Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "randomness"
SHOWS: tuple[Shows, ...] = ("contract",)


class SeedMixedWithRequest(StepLoop):
    """Let more than the seed decide."""

    def random(self, rows: Sequence[Row], first: int = 0) -> RoundRandom:
        """Return numbers that depend on what a request is called."""
        numbers = super().random(rows, first)
        seeds = [row.request.sampling.seed ^ (row.request.id << 3) for row in rows]
        return replace(numbers, keys=stream_keys(seeds, numbers.keys.device))


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy's numbers depend on request numbers."""
    return plant(strategy, SeedMixedWithRequest)
