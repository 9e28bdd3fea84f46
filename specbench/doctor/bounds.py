"""How fast decoding can get: the time to read the weights, and what speculation may add to that at most.

At batch 1 a decoding step reads every weight and the KV of the context once, so bytes / bandwidth is the
least time it can take, if the bandwidth is the highest there is. The draft's least time over the target's
is the c of `economics.break_even`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.economics.break_even import best_k, break_even_acceptance, predicted_speedup

CONTEXT = 1000
"""Tokens of context that the KV bytes are counted for."""

DRAFTED = (1, 3, 5)
ACCEPTANCES = (0.5, 0.7, 0.9)
_LARGEST_K = 32


@dataclass(frozen=True, slots=True)
class StepBound:
    """What one model's decoding step reads at batch 1, and the least seconds that takes."""

    name: str
    weight_bytes: int
    kv_bytes: int
    context: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """The most tokens per second of ordinary decoding."""
        return 1 / self.seconds


@dataclass(frozen=True, slots=True)
class Row:
    """Bounds on the speedup for one k, or for the best k of each acceptance.

    `verification_is_free` says that k + 1 tokens are within the ridge; None if the ridge is unknown.
    """

    label: str
    k: tuple[int, ...]
    speedups: tuple[float, ...]
    break_even: float | None
    verification_is_free: bool | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the bytes allow. `draft` is None where the draft is taken to cost nothing (an n-gram table)."""

    target: StepBound
    draft: StepBound | None
    cost_ratio: float
    ridge_tokens: float | None
    acceptances: tuple[float, ...]
    rows: tuple[Row, ...]


def step_bound(
    name: str, weight_bytes: int, kv_bytes: int, bandwidth: float, *, context: int = CONTEXT
) -> StepBound:
    """Return the least seconds of a step that reads so many bytes at `bandwidth` bytes per second."""
    if bandwidth <= 0 or weight_bytes <= 0:
        raise ValueError(f"{weight_bytes} bytes at {bandwidth} bytes per second; expected both above 0")
    return StepBound(name, weight_bytes, kv_bytes, context, (weight_bytes + kv_bytes) / bandwidth)


def ridge_tokens(bytes_per_weight: float, operations: float, bandwidth: float) -> float:
    """Return the tokens per step at which arithmetic takes as long as reading the weights.

    A token costs two operations per weight, so n tokens take 2 n / `operations` seconds per weight, and
    reading it takes `bytes_per_weight` / `bandwidth`. Above the ridge, verification is no longer free.
    """
    return bytes_per_weight * operations / (2 * bandwidth)


def bounds(target: StepBound, draft: StepBound | None, ridge: float | None) -> Bounds:
    """Return the bounds of a pair, or of a target with a draft that costs nothing."""
    ratio = draft.seconds / target.seconds if draft is not None else 0.0
    return Bounds(target, draft, ratio, ridge, ACCEPTANCES, rows(ratio, ridge))


def rows(
    cost_ratio: float,
    ridge: float | None,
    *,
    drafted: Sequence[int] = DRAFTED,
    acceptances: Sequence[float] = ACCEPTANCES,
) -> tuple[Row, ...]:
    """Return a row for each k, then one with the best k at each acceptance.

    The best k is searched where verification is free: up to the ridge, and to 32 at most.
    """
    table = [
        Row(
            label=f"k = {k}",
            k=(k,) * len(acceptances),
            speedups=tuple(predicted_speedup(alpha, k, cost_ratio) for alpha in acceptances),
            break_even=break_even_acceptance(k, cost_ratio),
            verification_is_free=None if ridge is None else k + 1 <= ridge,
        )
        for k in drafted
    ]
    largest = _LARGEST_K if ridge is None else min(_LARGEST_K, max(0, int(ridge) - 1))
    best = tuple(best_k(alpha, cost_ratio, largest) for alpha in acceptances)
    speedups = tuple(predicted_speedup(a, k, cost_ratio) for a, k in zip(acceptances, best, strict=True))
    free = None if ridge is None else True
    return (*table, Row("best k", best, speedups, None, free))
