"""Emitted tokens against the set of tokens that may be emitted: top-k, top-p, min-p, grammar, bias.

In float32 a token outside is a failure. In lower precision the edge itself is uncertain: tokens within a
margin of it are lumped into one symbol, and only those beyond the margin count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specbench.audit.betting import FloatArray, rare_event_factors, rare_event_mixture
from specbench.audit.verdicts import ComponentResult
from specbench.records import GENERATE_ORDER

NULL_RATE = 1e-4
"""Share of tokens that may fall beyond the margin by numerical error alone."""

IntArray = npt.NDArray[np.int64]


def exact(p: npt.ArrayLike, tokens: npt.ArrayLike) -> ComponentResult:
    """Check that no emitted token has probability 0 under the target.

    Null hypothesis: each token was drawn from its row of p. A token of probability 0 cannot be: one is
    enough, at any level.

    Invalid below float32, where rounding moves the edge of the support (use `Margin`), and when p processes
    the sampling parameters in another order than the decoder declares. Even in float32 two forwards differ
    by about 1e-5, so a token that ties with the edge to within that can be on the wrong side: such a
    finding names its position, where the two logits can be compared.

    No violation does not show that the law inside the support is right, nor that the support is not too
    small.

    Args:
        p: Processed probabilities [n, vocab].
        tokens: Emitted tokens [n].

    References:
        Holtzman et al., arXiv 1904.09751 (top-p); Nguyen et al., arXiv 2407.01082 (min-p).

    >>> exact([[0.5, 0.5, 0.0]] * 2, [0, 2]).words
    '1 of 2 tokens is one the target cannot emit here; the first is number 1'
    """
    rows, emitted = np.asarray(p, dtype=np.float64), np.asarray(tokens, dtype=np.int64)
    _check_shapes(rows, emitted)
    outside = np.flatnonzero(rows[np.arange(len(emitted)), emitted] <= 0)
    return _counted(outside.tolist(), len(emitted))


class Margin:
    """An e-process that grows with tokens that lie outside the support by more than a margin.

    Null hypothesis: given the past, a token lies beyond the margin with probability at most 1e-4. The bets
    are Bernoulli likelihood ratios of .001, .01, .1 and .5 against 1e-4, so that two or three strays in a
    thousand tokens are enough for an alarm, and one in ten thousand is not.

    Invalid when the margin was chosen from the audited tokens: measure it on ordinary decoding.

    No alarm does not show that the edge is where it should be, only that nothing lies far outside.

    Args:
        alpha: Its share of the error budget.
        margin: In logits, as `log_margins` measures them.

    References:
        Ramdas et al., "Game-theoretic statistics and safe anytime-valid inference" (2023).
    """

    def __init__(self, alpha: float, margin: float) -> None:
        if not margin >= 0:
            raise ValueError(f"margin is {margin}; expected 0 or more")
        self.margin = margin
        self.mixture = rare_event_mixture(alpha)
        self.strays = 0

    def add(self, margins: npt.ArrayLike) -> None:
        """Take in the log-margins of the emitted tokens in order [n]: positive inside, negative outside."""
        values = np.asarray(margins, dtype=np.float64)
        if np.isnan(values).any():
            raise ValueError("a margin is not a number")
        beyond = values < -self.margin
        self.strays += int(beyond.sum())
        self.mixture.multiply(rare_event_factors(beyond, NULL_RATE))

    def result(self) -> ComponentResult:
        """Return what was found so far."""
        words = f"{self.strays} of {self.mixture.steps} tokens lie more than {self.margin:g} outside"
        return self.mixture.component(
            "support", self.mixture.steps, found=f"{words} the support", quiet=f"{words} the support"
        )


def lump(
    p: npt.ArrayLike, margins: npt.ArrayLike, tokens: npt.ArrayLike, margin: float
) -> tuple[FloatArray, IntArray]:
    """Join all tokens within `margin` of the edge, inside or out, into one symbol, numbered vocab.

    The partition depends on the row alone, not on the token that was emitted, so every test of the lumped
    tokens against the lumped law is valid where it was on the plain ones.

    Args:
        p: Processed probabilities [n, vocab].
        margins: Log-margins of every token [n, vocab].
        tokens: Emitted tokens [n].
        margin: In logits.

    Returns:
        The lumped law [n, vocab + 1] and the lumped tokens [n].
    """
    rows, emitted = np.asarray(p, dtype=np.float64), np.asarray(tokens, dtype=np.int64)
    distances = np.asarray(margins, dtype=np.float64)
    _check_shapes(rows, emitted)
    near = np.abs(distances) <= margin
    lumped = np.concatenate(
        [np.where(near, 0.0, rows), np.where(near, rows, 0.0).sum(1, keepdims=True)], axis=1
    )
    is_near = near[np.arange(len(emitted)), emitted]
    return lumped, np.where(is_near, rows.shape[1], emitted)


def log_margins(
    logits: npt.ArrayLike,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    order: Sequence[str] = GENERATE_ORDER,
) -> FloatArray:
    """Return how far each token lies inside the support (positive) or outside (negative) [n, vocab].

    Measured in logits: to first order, the error of every logit that it would take to carry the token across
    the edge. The difference of two logits changes by at most twice that, and so do the log odds of the
    mass above a token, by which top-p decides. Parameters apply in `order`, each to what the one before
    left; a token's margin is its least.

    Args:
        logits: Raw logits [n, vocab], -inf for what grammar or bias forbid; such tokens get -inf.
        temperature: Above 0.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        order: As declared by the decoder.
    """
    scores = np.array(logits, dtype=np.float64)
    if not temperature > 0:
        raise ValueError("at temperature 0 the support is one token: see greedy regret")
    alive = scores > -math.inf
    margins = np.where(alive, math.inf, -math.inf)
    scale = 1.0  # logit errors are divided by the temperature along with the logits
    for name in order:
        if name == "temperature":
            scores, scale = scores / temperature, temperature
            continue
        remaining = np.where(alive, scores, -math.inf)
        if name == "top_k" and 0 < top_k < scores.shape[1]:
            here = _top_k_margins(scores, remaining, top_k)
        elif name == "top_p" and top_p < 1:
            here = _top_p_margins(scores, remaining, top_p)
        elif name == "min_p" and min_p > 0:
            here = scores - remaining.max(1, keepdims=True) - math.log(min_p)
        else:
            continue
        margins = np.minimum(margins, here * scale / 2)
        alive &= here >= 0
    return margins


def _top_k_margins(scores: FloatArray, remaining: FloatArray, top_k: int) -> FloatArray:
    kth = -np.partition(-remaining, top_k - 1, axis=1)[:, top_k - 1 : top_k]
    following = np.where(remaining < kth, remaining, -math.inf).max(1, keepdims=True)
    with np.errstate(invalid="ignore"):  # -inf - -inf where fewer than top_k remain: nothing is cut
        return np.asarray(np.where(scores >= kth, scores - following, scores - kth))


def _top_p_margins(scores: FloatArray, remaining: FloatArray, top_p: float) -> FloatArray:
    weights = np.exp(remaining - remaining.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    # Ascending and stable: of equal logits the lower id goes first, as in transformers on a CPU.
    order = np.argsort(scores, axis=1, kind="stable")[:, ::-1]
    ordered = np.take_along_axis(weights, order, 1)
    above = np.empty_like(ordered)
    np.put_along_axis(above, order, np.clip(ordered.cumsum(1) - ordered, 0.0, 1.0), 1)
    with np.errstate(divide="ignore"):
        log_odds = np.log(above) - np.log1p(-above)
    return np.asarray(math.log(top_p) - math.log1p(-top_p) - log_odds)


def _check_shapes(rows: FloatArray, tokens: IntArray) -> None:
    if rows.ndim != 2 or tokens.shape != rows.shape[:1]:
        raise ValueError(f"rows of shape {rows.shape} and tokens of {tokens.shape}; expected [n, vocab], [n]")


def _counted(outside: list[int], num: int) -> ComponentResult:
    if not num:
        words = "nothing was tested"
        return ComponentResult("support", False, None, "exact", 0.0, 0, words, conclusive=False)
    words = f"all {num} tokens are ones the target can emit"
    if outside:
        verb = "is one" if len(outside) == 1 else "are ones"
        words = (
            f"{len(outside)} of {num} tokens {verb} the target cannot emit here; "
            f"the first is number {outside[0]}"
        )
    return ComponentResult("support", bool(outside), float(len(outside)), "exact", 0.0, num, words)
