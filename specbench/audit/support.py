"""Emitted tokens against the set of tokens that may be emitted: top-k, top-p, min-p, grammar, bias.

In float32 a token outside is a failure. In lower precision the edge itself is uncertain: tokens within a
margin of it are lumped into one symbol, and only those beyond the margin count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specbench.audit.betting import FloatArray, rare_event_factors, rare_event_mixture
from specbench.audit.reference import Oracle, adjusted
from specbench.audit.verdicts import ComponentResult
from specbench.records import GENERATE_ORDER

SUPPORT_MARGIN = 1e-2
"""In logits: decoders in float32, ours or others', differ by some 1e-5 and may put the edge elsewhere."""
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
    are Bernoulli likelihood ratios of .001, .01, .1 and .5 against 1e-4, so that a handful of strays in a
    thousand tokens are enough for an alarm, and one in ten thousand is not.

    Invalid when the margin was chosen from the audited tokens: measure it on ordinary decoding.

    No alarm does not show that the edge is where it should be, only that nothing lies far outside.

    Args:
        alpha: Its share of the error budget.

    References:
        Ramdas et al., "Game-theoretic statistics and safe anytime-valid inference" (2023).
    """

    def __init__(self, alpha: float) -> None:
        self.mixture = rare_event_mixture(alpha)
        self.strays = 0

    def add(self, zones: npt.ArrayLike) -> None:
        """Take in the zones of the emitted tokens in order [n] (see `zones`)."""
        beyond = np.asarray(zones) < 0
        self.strays += int(beyond.sum())
        self.mixture.multiply(rare_event_factors(beyond, NULL_RATE))

    def result(self) -> ComponentResult:
        """Return what was found so far."""
        steps = self.mixture.steps
        words = f"{self.strays} of {steps} tokens lie outside the support by more than the margin"
        return self.mixture.component("support", steps, found=words, quiet=words)


def lump(p: npt.ArrayLike, zones: npt.ArrayLike, tokens: npt.ArrayLike) -> tuple[FloatArray, IntArray]:
    """Join all tokens near the edge, inside or out, into one symbol, numbered vocab.

    The partition depends on the row alone, not on the token that was emitted, so every test of the lumped
    tokens against the lumped law is valid where it was on the plain ones.

    Args:
        p: Processed probabilities [n, vocab].
        zones: Of every token [n, vocab].
        tokens: Emitted tokens [n].

    Returns:
        The lumped law [n, vocab + 1] and the lumped tokens [n].
    """
    rows, emitted = np.asarray(p, dtype=np.float64), np.asarray(tokens, dtype=np.int64)
    _check_shapes(rows, emitted)
    near = np.asarray(zones) == 0
    lumped = np.concatenate(
        [np.where(near, 0.0, rows), np.where(near, rows, 0.0).sum(1, keepdims=True)], axis=1
    )
    is_near = near[np.arange(len(emitted)), emitted]
    return lumped, np.where(is_near, rows.shape[1], emitted)


def zones(
    logits: npt.ArrayLike,
    margin: float,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    order: Sequence[str] = GENERATE_ORDER,
) -> npt.NDArray[np.int8]:
    """Say of each token whether it is in the support if every logit may be off by `margin` [n, vocab].

    1 is surely inside, -1 surely outside, and 0 may be either: near the edge. Bounds, on the safe side: two
    logits may change their distance, and the log odds of a set its value, by twice the margin, and each
    step sees both what may and what must have been left by the one before.

    Args:
        logits: Raw logits [n, vocab], -inf for what grammar or bias forbid.
        margin: In logits, 0 or more.
        temperature: Above 0.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        order: As declared by the decoder.
    """
    if not temperature > 0:
        raise ValueError("at temperature 0 the support is one token: see greedy regret")
    if not margin >= 0:
        raise ValueError(f"margin is {margin}; expected 0 or more")
    result = []
    for row in np.asarray(logits, dtype=np.float64):
        places = np.argsort(row, kind="stable")
        edge = _Edge(row[places], 2 * margin)
        for name in order:
            if name == "temperature":
                edge.rescale(temperature)
            elif name == "top_k" and top_k > 0:
                edge.cut_top_k(top_k)
            elif name == "top_p" and top_p < 1:
                edge.cut_top_p(top_p)
            elif name == "min_p" and min_p > 0:
                edge.cut_min_p(min_p)
        zone = np.empty(len(row), dtype=np.int8)
        zone[places] = np.where(edge.sure, 1, np.where(edge.possible, 0, -1))
        result.append(zone)
    return np.stack(result)


def zones_of_emitted(
    oracle: Oracle,
    probabilities: Sequence[float],
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
) -> IntArray:
    """Return the zone of each token of an output [T], with `SUPPORT_MARGIN`: 1 inside, else see `zones`.

    Args:
        oracle: The reference, with the sampling that the output was drawn under.
        probabilities: What its law gives each token [T]; where that is not 0 there is nothing to ask.
        logits: As `Oracle.rows` yields them [T, vocab].
        prompt: Before the output.
        output: Its tokens.
    """
    sampling = oracle.sampling
    found = np.ones(len(output), dtype=np.int64)
    for place in (i for i, probability in enumerate(probabilities) if probability <= 0):
        scores = adjusted(logits[place], sampling, tuple(prompt), tuple(output[:place]), oracle.ends)
        row = zones(
            scores[None].cpu().numpy(),
            SUPPORT_MARGIN,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            order=sampling.order,
        )[0]
        found[place] = row[output[place]]
    return found


class _Edge:
    """One row, ascending: which tokens may and which must remain when distances are off by `slack`."""

    def __init__(self, scores: FloatArray, slack: float) -> None:
        self.scores = scores
        self.slack = slack
        self.possible = scores > -math.inf
        self.sure = self.possible.copy()

    def rescale(self, temperature: float) -> None:
        self.scores = self.scores / temperature
        self.slack /= temperature

    def cut_top_k(self, top_k: int) -> None:
        above, _ = self._above(self.sure.astype(np.float64), self.slack)
        upto, _ = self._above(self.possible.astype(np.float64), -self.slack)
        self._keep(above < top_k, upto - self.possible < top_k)

    def cut_top_p(self, top_p: float) -> None:
        weights = np.exp(self.scores - self.scores[-1])
        fewest_above, _ = self._above(weights * self.sure, self.slack)
        most_below = (weights * self.possible).sum() - fewest_above
        own = weights * self.possible
        most_above, _ = self._above(own, -self.slack)
        _, fewest_below = self._above(weights * self.sure, -self.slack)
        odds = top_p / (1 - top_p)
        # Rounding in the sums must not put a token that is alone on the wrong side.
        rounding = 1e-12 * weights.sum()
        stretch = math.exp(self.slack)
        self._keep(
            fewest_above - rounding <= odds * most_below * stretch,
            (most_above - own + rounding) * stretch < odds * (fewest_below + own),
        )

    def cut_min_p(self, min_p: float) -> None:
        least = self.scores[-1] + math.log(min_p)
        self._keep(self.scores + self.slack >= least, self.scores - self.slack >= least)

    def _keep(self, may: npt.NDArray[np.bool_], must: npt.NDArray[np.bool_]) -> None:
        self.possible &= may
        self.sure &= must & self.possible

    def _above(self, values: FloatArray, distance: float) -> tuple[FloatArray, FloatArray]:
        """Sum values over the tokens above each score + distance (from it on if below), and over the rest."""
        sums = np.concatenate([[0.0], values.cumsum()])
        side: Literal["left", "right"] = "right" if distance >= 0 else "left"
        places = np.searchsorted(self.scores, self.scores + distance, side=side)
        return np.asarray(sums[-1] - sums[places]), np.asarray(sums[places])


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
