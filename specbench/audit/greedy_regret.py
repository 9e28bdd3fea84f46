"""Greedy decoding by regret: how far below the largest logit each emitted token lies.

Strings of two correct greedy decoders differ at near-ties, where rounding decides; regret does not mind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from specbench.audit.betting import FloatArray, rare_event_factors, rare_event_mixture
from specbench.audit.verdicts import ComponentResult

FLOOR = 1e-3
QUANTILE = 0.9999
FACTOR = 4.0
CAP_FLOAT32 = 1e-2
CAP_LOWER_PRECISION = 0.5
FEWEST_TOKENS = 100_000
"""Spec-off tokens that the quantile needs: ten of them lie beyond it."""
NULL_RATE = 1 - QUANTILE


def regrets(logits: npt.ArrayLike, tokens: npt.ArrayLike) -> FloatArray:
    """Return the largest logit less that of the emitted token, per position [n].

    Args:
        logits: The reference's, on the engine's own output, processed by all but temperature [n, vocab].
        tokens: What was emitted [n].

    Raises:
        ValueError: A largest logit is not finite.

    >>> regrets([[1.0, 3.0], [2.0, 1.5]], [1, 1]).tolist()
    [0.0, 0.5]
    """
    rows, emitted = np.asarray(logits, dtype=np.float64), np.asarray(tokens, dtype=np.int64)
    largest = rows.max(1)
    if not np.isfinite(largest).all():
        raise ValueError("the largest logit of a row is not finite")
    return np.asarray(largest - rows[np.arange(len(emitted)), emitted])


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A regret that numerical error explains. `quantile` is of `tokens` spec-off tokens."""

    value: float
    quantile: float
    tokens: int
    cap: float

    @property
    def conclusive(self) -> bool:
        """Return whether enough was measured, and the noise is small enough to judge by."""
        return self.tokens >= FEWEST_TOKENS and self.value <= self.cap


def tolerance(spec_off: npt.ArrayLike, *, dtype: str) -> Tolerance:
    """Derive the tolerance from ordinary decoding of the same engine: max(1e-3, 4 x the .9999 quantile).

    Args:
        spec_off: Regrets without speculation, at least 1e5, at the widths that speculation uses (1 and
            k + 1) and its batch sizes.
        dtype: The engine's: "float32" is capped at 1e-2, anything else at .5. Above its cap the tolerance
            would excuse real faults: the test is then inconclusive.
    """
    values = np.asarray(spec_off, dtype=np.float64)
    if not len(values) or not np.all(values >= 0):
        raise ValueError("expected one or more regrets, each 0 or more")
    quantile = float(np.quantile(values, QUANTILE, method="higher"))
    cap = CAP_FLOAT32 if dtype == "float32" else CAP_LOWER_PRECISION
    return Tolerance(max(FLOOR, FACTOR * quantile), quantile, len(values), cap)


class GreedyRegret:
    """An e-process that grows with tokens whose regret exceeds the tolerance.

    Null hypothesis: given the past, a token's regret exceeds the tolerance with probability at most 1e-4:
    by rounding alone, as in ordinary decoding. The bets are Bernoulli likelihood ratios of .001, .01, .1 and
    .5 against 1e-4.

    Invalid when the reference's logits are not those of the engine's target (other weights, template, or
    processing), and when the tolerance was measured on other widths, batch sizes or prompts.

    No alarm does not show that the decoder is right when it samples: residual and bonus rows are hardly
    exercised at temperature 0.

    Args:
        alpha: Its share of the error budget.
        tolerance: From `tolerance`.

    References:
        Token-DiFR, arXiv 2511.20621, on margins between the chosen and the best token.
    """

    def __init__(self, alpha: float, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self.mixture = rare_event_mixture(alpha)
        self.exceeded = 0
        self.largest = 0.0

    def add(self, values: npt.ArrayLike) -> None:
        """Take in the regrets of emitted tokens in order [n]."""
        array = np.asarray(values, dtype=np.float64)
        if not np.all(array >= 0):
            raise ValueError("a regret is negative or not a number")
        beyond = array > self.tolerance.value
        self.exceeded += int(beyond.sum())
        self.largest = max(self.largest, float(array.max(initial=0.0)))
        self.mixture.multiply(rare_event_factors(beyond, NULL_RATE))

    def result(self) -> ComponentResult:
        """Return what was found so far; without a usable tolerance never an alarm, and never a pass."""
        steps, limit = self.mixture.steps, self.tolerance
        if not limit.conclusive:
            words = (
                f"ordinary decoding itself errs by {limit.value:.2g}, above {limit.cap:g}"
                if limit.value > limit.cap
                else f"the tolerance rests on {limit.tokens} tokens; expected {FEWEST_TOKENS} or more"
            )
            return ComponentResult(
                "greedy regret", False, None, "log e", self.mixture.alpha, steps, words, conclusive=False
            )
        words = (
            f"{self.exceeded} of {steps} tokens exceed a regret of {limit.value:.2g}, "
            f"the largest {self.largest:.2g}"
        )
        return self.mixture.component("greedy regret", steps, found=words, quiet=words)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two greedy outputs first differ, and by how much the reference prefers one token.

    A "near-tie" is one that numerical error explains; "real" is not; "length" means that one output ends
    where the other goes on, and has no logits.
    """

    position: int
    kind: Literal["near-tie", "real", "length"]
    tokens: tuple[int | None, int | None]
    logits: tuple[float, float] | None
    largest: float | None


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position where two outputs differ, also by ending; None if they are equal.

    >>> first_difference([1, 2, 3], [1, 2])
    2
    """
    shorter = min(len(one), len(other))
    differing = (i for i in range(shorter) if one[i] != other[i])
    return next(differing, None if len(one) == len(other) else shorter)


def divergence(
    one: Sequence[int], other: Sequence[int], logits: npt.ArrayLike, limit: Tolerance
) -> Divergence | None:
    """Class the first difference of two greedy outputs of one prompt; None if they are equal.

    What follows a first difference has another context, and says nothing more.

    Args:
        one: Output with speculation.
        other: Output without.
        logits: The reference's along `one`, the row of the differing position included [n, vocab].
        limit: The tolerance; a near-tie is a difference where both tokens are within it of the largest.
    """
    place = first_difference(one, other)
    if place is None:
        return None
    if place >= min(len(one), len(other)):
        ended = (
            one[place] if place < len(one) else None,
            other[place] if place < len(other) else None,
        )
        return Divergence(place, "length", ended, None, None)
    row = np.asarray(logits, dtype=np.float64)[place]
    tokens = (one[place], other[place])
    values = (float(row[tokens[0]]), float(row[tokens[1]]))
    largest = float(row.max())
    if not math.isfinite(largest):
        raise ValueError("the largest logit of a row is not finite")
    kind: Literal["near-tie", "real"] = "near-tie" if largest - min(values) <= limit.value else "real"
    return Divergence(place, kind, tokens, values, largest)
