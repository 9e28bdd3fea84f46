"""Make the generator anew in every round, from the request's seed.

Every round then throws the same coins and draws with the same numbers. Over many requests each number is as
it should be; within one they repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.random_numbers import RoundRandom
from specbench.runtime.loop import Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "randomness"
SHOWS: tuple[Shows, ...] = ("good", "bad", "contract")


class ReseededEveryRound(StepLoop):
    """Forget how far a stream has been read."""

    def random(self, rows: Sequence[Row], first: int = 0) -> RoundRandom:
        """Return the numbers of the beginning."""
        numbers = super().random(rows, first)
        start = torch.zeros_like(numbers.positions)
        return replace(numbers, positions=start, rounds=start)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy begin its streams again every round."""
    return plant(strategy, ReseededEveryRound)
