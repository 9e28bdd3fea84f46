"""Draw the recovered token with the number that drew the rejected one.

After a rejection that number is known to lie where the draft token was, so the recovered token leans towards
neighbouring ids. Each of the two draws looks right by itself. Needs a residual of several tokens.
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


class DraftNumberReusedForResidual(StepLoop):
    """Use one number for two purposes."""

    def random(self, rows: Sequence[Row], first: int = 0) -> RoundRandom:
        """Return numbers of which two streams are the same."""
        numbers = super().random(rows, first)
        keys = numbers.keys.clone()
        keys[:, Purpose.RESIDUAL] = keys[:, Purpose.DRAFT]
        return replace(numbers, keys=keys)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy use the draft's random numbers again."""
    return plant(strategy, DraftNumberReusedForResidual)
