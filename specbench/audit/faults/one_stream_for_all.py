"""Let all requests share one stream of random numbers.

Every request by itself follows the law; two of the same prompt say the same. Reports: vLLM 17509 weighs one
generator for all requests.
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
SHOWS: tuple[Shows, ...] = ("contract", "collisions")


class OneStreamForAll(StepLoop):
    """Give every request the same numbers."""

    def random(self, rows: Sequence[Row], first: int = 0) -> RoundRandom:
        """Return the numbers of seed 0 for all rows."""
        numbers = super().random(rows, first)
        return replace(numbers, keys=stream_keys([0] * len(rows), numbers.keys.device))


def alter(strategy: Strategy) -> Strategy:
    """Let the requests of a strategy share their random numbers."""
    return plant(strategy, OneStreamForAll)
