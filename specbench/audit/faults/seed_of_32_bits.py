"""Keep 32 bits of a seed.

Requests whose seeds differ above them share their numbers. Random seeds hardly ever show it: pairs that
agree in the low half must be asked for.
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


class SeedOf32Bits(StepLoop):
    """Store the seed in half a word."""

    def random(self, rows: Sequence[Row], first: int = 0) -> RoundRandom:
        """Return the numbers of the low half of each seed."""
        numbers = super().random(rows, first)
        seeds = [row.request.sampling.seed % (1 << 32) for row in rows]
        return replace(numbers, keys=stream_keys(seeds, numbers.keys.device))


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy truncate seeds."""
    return plant(strategy, SeedOf32Bits)
