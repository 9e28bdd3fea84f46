"""Throw the coin with the number that drew the draft token.

Tokens of low ids come from low numbers, and low coins accept: low ids are accepted, high ones refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.random_numbers import Purpose, RoundRandom
from specbench.runtime.loop import Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "randomness"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class DraftNumberReusedForCoin(StepLoop):
    """Use one number for two purposes."""

    def random(self, rows: Sequence[Row], first: int = 0) -> RoundRandom:
        """Return numbers of which two streams are the same."""
        numbers = super().random(rows, first)
        keys = numbers.keys.clone()
        keys[:, Purpose.COIN] = keys[:, Purpose.DRAFT]
        return replace(numbers, keys=keys)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy use the draft's random numbers again."""
    return plant(strategy, DraftNumberReusedForCoin)
