"""Ignore the seed of a request.

The law is right, and no output can be had twice. Reports: vLLM 6038.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.random_numbers import RoundRandom, stream_keys
from specbench.runtime.loop import Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "randomness"
SHOWS: tuple[Shows, ...] = ("contract",)


class SeedIgnored(StepLoop):
    """Draw new streams for every schedule."""

    schedules = itertools.count()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.number = next(SeedIgnored.schedules)

    def random(self, rows: Sequence[Row], first: int = 0) -> RoundRandom:
        """Return numbers of streams that nobody asked for."""
        numbers = super().random(rows, first)
        seeds = [self.number * 1_000_003 + row.request.id for row in rows]
        return replace(numbers, keys=stream_keys(seeds, numbers.keys.device))


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy ignore seeds."""
    return plant(strategy, SeedIgnored)
