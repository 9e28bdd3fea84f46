"""Speculation on against off, request by request, for engines whose law is known only through a reference.

Both sides are scored by the same reference, so whatever is wrong with it cancels in the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specbench.audit.betting import FloatArray, Mixture
from specbench.audit.verdicts import ComponentResult

WAGERS = (0.05, 0.15, 0.4, 0.8)
CALIBRATION_PAIRS = 20
SCORES_WITHOUT_DRAFT = ("surprisal", "id rank")
SCORES_WITH_DRAFT = ("surprisal", "id rank", "lean", "sign")

CHUNK_VALUES = 4_000_000  # most sign flips held at a time


def token_scores(p: npt.ArrayLike, tokens: npt.ArrayLike, q: npt.ArrayLike | None = None) -> FloatArray:
    """Score emitted tokens, each score less its mean under the reference [n, scores].

    - surprisal: -log p(x);
    - id rank: the mid-rank of x in the reference's CDF taken in id order, in [-1, 1];
    - lean: 2 (q - p) / (q + p) at x;
    - sign: 1 where q(x) > p(x), else 0.

    Sum or average them over all tokens of a request (all its samples together) for `Paired`. Taking off the
    mean only removes noise: on and off are scored alike, so any function of the text is valid.

    Args:
        p: The reference's processed law along the text [n, vocab].
        tokens: What was emitted [n].
        q: The draft's law along the text [n, vocab]; without it the last two scores drop out.
    """
    law, emitted = np.asarray(p, dtype=np.float64), np.asarray(tokens, dtype=np.int64)
    surprisal = -np.log(np.maximum(law, 1e-30))  # an impossible token scores high, but finite
    id_rank = 2 * law.cumsum(1) - law - 1
    scores = [surprisal, id_rank]
    if q is not None:
        draft = np.asarray(q, dtype=np.float64)
        total = draft + law
        scores.append(np.divide(2 * (draft - law), total, out=np.zeros_like(law), where=total > 0))
        scores.append((draft > law).astype(np.float64))
    rows = np.arange(len(emitted))
    return np.stack([score[rows, emitted] - (law * score).sum(1) for score in scores], axis=1)


class Paired:
    """A sequential test that speculation changes no score of the text.

    Null hypothesis: within each pair, given all earlier pairs, the request with speculation and the one
    without are exchangeable: same prompt and parameters, other seeds. Each difference D = S_on - S_off is
    then symmetric about 0, and 1 + l tanh(D / 2c) has mean 1 for any |l| < 1 and any scale c that is known
    before the pair. c is the root mean square of D in the first 20 pairs, which are not bet on. The e-value
    averages over l in +-{.05 .15 .4 .8} and over scores. Valid whatever the reference: a bad one costs power.

    With an allowance m for a pair the null is wider: D is no more than m above, and no more than m below,
    something symmetric about 0. The factors are then 1 + l tanh((D - m) / 2c) and 1 + l tanh((-D - m) / 2c).
    That is for engines whose numbers differ a little between on and off, whatever the decoder does.

    Invalid when on and off differ in anything else (order within the pair not random, another server state,
    a cache that only one of them hits), when samples of one request are taken for separate pairs, or when
    pairs are lost for what they said. Where an engine drifts, send on and off interleaved.

    No alarm does not show that the laws are equal: only that these scores shifted by less than the test can
    see. Run it on two spec-off starts as well (the A/A arm): an alarm there means that pairs are not
    exchangeable, and no other result of the run can be trusted.

    Args:
        alpha: Its share of the error budget.
        scores: Their names, the columns of what is added.
        name: Of the result; "A/A" for the control arm.

    References:
        Ramdas et al., "Game-theoretic statistics and safe anytime-valid inference" (2023), on betting; Model
        Equality Testing, arXiv 2410.20247, for the setting.

    >>> generator = np.random.default_rng(0)
    >>> test = Paired(alpha=0.001, scores=["surprisal"])
    >>> test.add(generator.normal(1.0, 1.0, (80, 1)), tokens=80 * 64)
    >>> (test.result().alarm, test.best)
    (True, 'surprisal, on above off')
    """

    def __init__(
        self, alpha: float, scores: Sequence[str] = SCORES_WITH_DRAFT, *, name: str = "paired"
    ) -> None:
        bets = [
            f"{score}, on {'above' if sign > 0 else 'below'} off ({wager:g})"
            for score in scores
            for sign in (1, -1)
            for wager in WAGERS
        ]
        self.name = name
        self.scores = tuple(scores)
        self.mixture = Mixture(bets, alpha)
        self.tokens = 0
        self.pairs = 0
        self._calibration: list[FloatArray] = []
        self._scale: FloatArray | None = None

    def add(self, differences: npt.ArrayLike, *, tokens: int, allowed: npt.ArrayLike = 0.0) -> None:
        """Take in pairs in order.

        Args:
            differences: S_on - S_off per pair and score [n, scores].
            tokens: Of one arm.
            allowed: By how much each difference may be off for reasons that are nobody's fault, 0 or more
                [n, scores], or what broadcasts to it. Known before the pair, but for its length.
        """
        values = np.asarray(differences, dtype=np.float64).reshape(-1, len(self.scores))
        margins = np.broadcast_to(np.asarray(allowed, dtype=np.float64), values.shape)
        if not np.isfinite(values).all():
            raise ValueError("a difference is not finite")
        if not np.all(margins >= 0):
            raise ValueError("an allowance is negative or not a number")
        self.pairs += len(values)
        self.tokens += tokens
        wanted = CALIBRATION_PAIRS - len(self._calibration)
        self._calibration.extend(values[:wanted])
        values, margins = values[wanted:], margins[wanted:]
        if not len(values):
            return
        if self._scale is None:
            self._scale = np.sqrt((np.stack(self._calibration) ** 2).mean(0))
            self._scale[self._scale == 0] = 1.0
        bets = [np.tanh((sign * values - margins) / (2 * self._scale)) for sign in (1, -1)]
        factors = np.stack([wager * bet for bet in bets for wager in WAGERS], axis=-1)
        self.mixture.multiply(np.log1p(factors).reshape(len(values), -1))

    @property
    def scale(self) -> FloatArray | None:
        """The c of each score [scores]; None as long as pairs are collected for it."""
        return self._scale

    @property
    def best(self) -> str:
        """Return the score and direction with the most evidence."""
        return self.mixture.best.rpartition(" (")[0]

    def result(self) -> ComponentResult:
        """Return what was found so far; tokens are those of one arm."""
        return self.mixture.component(
            self.name,
            self.tokens,
            found=f"the two arms differ over {self.pairs} pairs ({self.best})",
            quiet=f"{self.pairs} pairs show no difference between the two arms",
        )


def planned(
    differences: npt.ArrayLike,
    *,
    alpha: float,
    generator: np.random.Generator,
    tokens: int,
    name: str = "paired",
    resamples: int | None = None,
) -> ComponentResult:
    """Test all pairs at once, by the largest |z| over scores and its law under random swaps.

    Null hypothesis: as for `Paired`. Swapping on and off within pairs then changes nothing, so the p-value
    (add-one, over random swaps of whole pairs) is valid for any number of pairs and any scores.

    Invalid when evaluated more than once, or at a number of pairs that depended on what was seen; otherwise
    as for `Paired`. A large p does not show that the laws are equal.

    Args:
        differences: S_on - S_off of all planned pairs [n, scores].
        alpha: Its share of the error budget.
        generator: Of the swaps.
        tokens: Of one arm.
        name: Of the result; "A/A" for the control arm.
        resamples: At least 10 / alpha, the default.

    References:
        Fisher, The Design of Experiments (1935), section 21; Westfall and Young, Resampling-Based Multiple
        Testing (1993), on the largest of several statistics.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 2 or not np.isfinite(values).all():
        raise ValueError("expected finite differences [pairs, scores]")
    needed = math.ceil(10 / alpha - 1e-6)
    resamples = needed if resamples is None else resamples
    if resamples < needed:
        raise ValueError(f"{resamples} resamples are too few to read p at {alpha:g}; expected {needed}")
    sizes = np.sqrt((values**2).sum(0))
    if not (sizes > 0).any():
        words = "all pairs are equal in every score: nothing was tested"
        return ComponentResult(name, False, None, "p", alpha, tokens, words, conclusive=False)
    scaled = values[:, sizes > 0] / sizes[sizes > 0]
    observed = float(np.abs(scaled.sum(0)).max())
    exceedances = simulated = 0
    while simulated < resamples:
        chunk = min(resamples - simulated, max(1, CHUNK_VALUES // len(scaled)))
        signs = generator.integers(0, 2, (chunk, len(scaled)), dtype=np.int8) * 2.0 - 1.0
        largest = np.abs(signs @ scaled).max(1)
        exceedances += int((largest >= observed * (1 - 1e-12)).sum())
        simulated += chunk
    p_value = (1 + exceedances) / (1 + resamples)
    words = (
        f"{len(values)} pairs, largest |z| over {values.shape[1]} scores {observed:.1f}, p = {p_value:.2g}"
    )
    return ComponentResult(name, p_value <= alpha, p_value, "p", alpha, tokens, words)
