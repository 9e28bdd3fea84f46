"""Statistics on plain numbers and counts: paired speedups, shares, and the chi-squared test with its power.

Knows nothing of prompts, tokens or models. Docstrings follow scipy.stats; their examples are run as tests.
scipy is imported inside the functions that need it, because importing it takes half a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate from `num` units; `low` and `high` are None where `num` is too small for an interval."""

    value: float
    low: float | None
    high: float | None
    num: int


# Speedups and shares


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of one or more positive numbers.

    >>> round(geometric_mean([0.5, 2.0]), 12)
    1.0
    """
    return math.exp(float(np.mean(_logarithms(values))))


def paired_speedup(
    baseline: Mapping[str, Sequence[float]],
    candidate: Mapping[str, Sequence[float]],
    *,
    seed: int = 0,
    resamples: int = 2000,
    confidence: float = 0.95,
) -> Interval | None:
    """Estimate baseline time / candidate time: the geometric mean over prompts, with a bootstrap interval.

    Each key is a prompt, each value its times over repeats. Within a prompt, repeats that were
    interleaved belong together: when both sides have the same number, the prompt's ratio is the median
    of the ratios per repeat. Otherwise (a repeat was lost) it is the ratio of the two medians. Medians,
    because one disturbed repeat should not move a prompt; taken over logarithms, so that swapping the
    two sides gives exactly the reciprocal.

    Args:
        baseline: Times per prompt, each positive.
        candidate: The same. Prompts that only one side has, or that have no time, are left out.
        seed: Seeds the resampling of prompts.
        resamples: How often the prompts are resampled.
        confidence: Of the percentile interval.

    Returns:
        The interval (1.0 is no change), `num` being the prompts in common; None if there are none. With
        one prompt the bounds are None.

    The interval is about prompts like these: it covers the variation between prompts, and the noise
    between repeats only as far as it shows as such. It assumes that prompts were drawn independently, and
    is too narrow for few of them (of 95 % intervals some 84 % cover the truth with 5, 90 % with 10). An
    interval that contains 1 does not show that the two are equally fast.

    References:
        Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.

    >>> paired_speedup({"a": [2.0, 2.2], "b": [3.0]}, {"a": [1.0, 1.1], "c": [1.0]})
    Interval(value=2.0, low=None, high=None, num=1)
    """
    common = [key for key in baseline if len(baseline[key]) and len(candidate.get(key, ()))]
    if not common:
        return None
    log_ratios = np.array([_log_ratio(baseline[key], candidate[key]) for key in sorted(common)])
    value = math.exp(float(log_ratios.mean()))
    if len(common) == 1:
        return Interval(value, None, None, 1)
    generator = np.random.default_rng(seed)
    means = [generator.choice(log_ratios, len(log_ratios)).mean() for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, math.exp(low), math.exp(high), len(common))


def _log_ratio(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    """Return the log of one prompt's speedup (see `paired_speedup`)."""
    before, after = _logarithms(baseline), _logarithms(candidate)
    if len(before) == len(after):
        return float(np.median(before - after))
    return float(np.median(before) - np.median(after))


def _logarithms(values: Sequence[float]) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if not array.size or not np.all(np.isfinite(array) & (array > 0)):
        raise ValueError(f"expected one or more positive finite numbers, got {list(values)}")
    return np.log(array)


def wilson(successes: int, trials: int, confidence: float = 0.95) -> Interval | None:
    """Estimate a probability from independent trials, with Wilson's score interval; None without trials.

    Invalid when the trials are not independent (tokens of one text are not), which makes it too narrow.
    Unlike the textbook interval it stays inside [0, 1] and is sensible at 0 or all successes.

    References:
        Wilson, JASA 22 (1927); Brown, Cai and DasGupta, Statistical Science 16 (2001).

    >>> interval = wilson(0, 100)
    >>> (interval.value, interval.low, round(interval.high, 4))
    (0.0, 0.0, 0.037)
    """
    from scipy import special

    if not 0 <= successes <= trials:
        raise ValueError(f"expected 0 <= successes <= trials, got {successes} of {trials}")
    if trials == 0:
        return None
    share = successes / trials
    z = float(special.ndtri((1 + confidence) / 2))
    shrink = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return Interval(share, low, high, trials)


# The chi-squared test


def pool_by_expected(expected: npt.ArrayLike, minimum: float = 10.0) -> IntArray:
    """Assign each category to a cell, so that every cell expects at least `minimum` counts.

    Categories that expect enough are cells of their own, numbered by falling expected count (the earlier
    category first on ties). All others share one last cell, the tail. A tail that still expects too
    little joins the smallest of the other cells. Only when everything together expects too little does a
    cell (the only one) stay below the minimum.

    The partition must not depend on what was observed: pooling by observed counts selects on the outcome
    and breaks the test's level. That is why this function is not given them.

    Returns:
        The cell of each category [categories]; cells are 0 .. max.

    >>> pool_by_expected([3.0, 50.0, 20.0, 9.0]).tolist()
    [2, 0, 1, 2]
    >>> pool_by_expected([3.0, 50.0, 20.0]).tolist()
    [1, 0, 1]
    """
    expected = np.asarray(expected, dtype=np.float64)
    order = np.argsort(-expected, kind="stable")
    kept = int(np.count_nonzero(expected >= minimum))
    tail = order[kept:]
    labels = np.empty(len(expected), dtype=np.int64)
    labels[order[:kept]] = np.arange(kept)
    tail_stands_alone = kept == 0 or expected[tail].sum() >= minimum
    labels[tail] = kept if tail_stands_alone else kept - 1
    return labels


def chi_squared_statistic(observed: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Return Pearson's X2, the sum over cells of (observed - expected)^2 / expected.

    A cell that expects nothing adds nothing when nothing was seen there, and infinity otherwise.

    >>> chi_squared_statistic([60, 40], [50.0, 50.0])
    4.0
    """
    counts, means = np.asarray(observed, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    possible = means > 0
    if np.any(counts[~possible] > 0):
        return math.inf
    return float(np.sum((counts[possible] - means[possible]) ** 2 / means[possible]))


def standardised_residuals(observed: npt.ArrayLike, expected: npt.ArrayLike) -> FloatArray:
    """Return how far each cell of one table is from what was expected, in its own standard deviations.

    (O - E) / sqrt(E (1 - E / n)), n the draws of the table: approximately standard normal where the draws
    follow the law, for each cell alone. Those of one table depend on one another, and of many cells some
    are large; the test is the chi-squared statistic. 0 where one cell expects every draw.

    References:
        Haberman, The analysis of residuals in cross-classified tables, Biometrics 29 (1973).

    >>> standardised_residuals([60, 40], [50, 50]).tolist()
    [2.0, -2.0]
    """
    counts, means = np.asarray(observed, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    variance = means * (1 - means / means.sum())
    residuals = np.zeros_like(means)
    np.divide(counts - means, np.sqrt(variance), out=residuals, where=variance > 0)
    return residuals


def count_band(trials: int, share: float, confidence: float = 0.99) -> tuple[int, int]:
    """Return counts between which a count of independent trials lies with this probability or more.

    Pointwise: for one count that was chosen beforehand. Of twenty such counts one is outside of a band of
    .99 in nearly every fifth picture.

    >>> count_band(1000, 0.05)
    (33, 69)
    """
    from scipy import stats

    outside = (1 - confidence) / 2
    law = stats.binom(trials, share)
    return int(law.ppf(outside)), int(law.ppf(1 - outside))


def degrees_of_freedom(cells_per_table: Sequence[int]) -> int:
    """Return the degrees of freedom of several tables with known probabilities: cells - 1, summed."""
    return sum(max(0, cells - 1) for cells in cells_per_table)


def tail_p_value(statistic: float, df: int) -> float:
    """Return P(chi-squared with `df` degrees of freedom >= `statistic`), the large-sample p-value of X2.

    Too liberal in the far tail, below about 1e-3, when cells expect some 10 counts: use
    `monte_carlo_p_value` for verdicts.

    >>> round(tail_p_value(52.386, 20), 7)
    0.0001
    """
    from scipy import special

    return float(special.chdtrc(df, statistic))


STOP_AFTER_EXCEEDANCES = 200
"""Simulated statistics at or above the observed one after which a p-value is known well enough (to 7 %)."""

CHUNK_VALUES = 2_000_000
"""Most simulated counts held at a time: 16 MB, and a few temporaries of the same size."""


def monte_carlo_resamples(alpha: float) -> int:
    """Return how many tables are simulated for a p-value that will be read at level `alpha`, at most.

    >>> monte_carlo_resamples(1e-4)
    100000
    """
    return math.ceil(10 / alpha - 1e-6)  # 10 / 1e-5 is 1000000.0000000001


def smallest_p_value(alpha: float) -> float:
    """Return the p-value of `monte_carlo_p_value` when no simulated table was as extreme: a bound, no value.

    >>> smallest_p_value(0.01)
    0.000999000999000999
    """
    return 1 / (1 + monte_carlo_resamples(alpha))


def monte_carlo_p_value(
    observed_tables: Sequence[npt.ArrayLike],
    expected_prob_tables: Sequence[npt.ArrayLike],
    *,
    generator: np.random.Generator,
    alpha: float,
    resamples: int | None = None,
) -> float:
    """Test whether each table of counts came from its own known probabilities; return the p-value.

    Null hypothesis: the tables are independent, and each is multinomial with its given probabilities.
    The statistic is the sum over tables of Pearson's X2. Its law under the null is simulated, so no
    expected count is too small for validity. The p-value is (1 + exceedances) / (1 + resamples), where
    an exceedance is a simulated statistic at or above the observed one.

    The simulation ends early at the 200th exceedance; the p-value is then 200 / (simulations so far).
    This is Besag and Clifford's sequential p-value: P(p <= a) <= a holds exactly for every a, because the
    rule looks at simulated statistics only. It saves time where there is nothing to find.

    Invalid when draws within a table depend on one another, when the probabilities were estimated from
    the same draws, or when the cells were chosen by looking at the counts. A large p-value does not show
    that the probabilities are right: `smallest_detectable_tv` says what could have gone unnoticed.

    Args:
        observed_tables: Counts per table [cells].
        expected_prob_tables: Probabilities per table [cells], renormalised here.
        generator: The source of the simulated tables.
        alpha: The level at which the p-value will be read.
        resamples: At least 10 / alpha (the default), so that the smallest possible p-value is well below.

    References:
        Besag and Clifford, Biometrika 78 (1991); Davison and Hinkley, Bootstrap Methods (1997), ch. 4.

    >>> monte_carlo_p_value([[90, 10]], [[0.5, 0.5]], generator=np.random.default_rng(0), alpha=0.01)
    0.000999000999000999
    """
    needed = monte_carlo_resamples(alpha)
    resamples = needed if resamples is None else resamples
    if resamples < needed:
        raise ValueError(
            f"{resamples} resamples are too few to read p at {alpha:g}; expected at least {needed}"
        )
    counts = [np.asarray(table, dtype=np.int64) for table in observed_tables]
    probabilities = [np.asarray(table, dtype=np.float64) for table in expected_prob_tables]
    probabilities = [table / table.sum() for table in probabilities]
    statistic = sum(
        chi_squared_statistic(table, table.sum() * law)
        for table, law in zip(counts, probabilities, strict=True)
    )
    # A simulated table equal to the observed one must count as an exceedance whatever the order of additions.
    threshold = statistic * (1 - 1e-12)

    largest_chunk = max(1, CHUNK_VALUES // max((len(law) for law in probabilities), default=1))
    exceedances = simulated = 0
    chunk = 256
    while simulated < resamples:
        chunk = min(chunk, largest_chunk, resamples - simulated)
        totals = np.zeros(chunk)
        for table, law in zip(counts, probabilities, strict=True):
            totals += _simulated_statistics(int(table.sum()), law, chunk, generator)
        places = np.flatnonzero(totals >= threshold)
        if exceedances + len(places) >= STOP_AFTER_EXCEEDANCES:
            last = int(places[STOP_AFTER_EXCEEDANCES - exceedances - 1])
            return STOP_AFTER_EXCEEDANCES / (simulated + last + 1)
        exceedances += len(places)
        simulated += chunk
        chunk *= 4
    return (1 + exceedances) / (1 + resamples)


def _simulated_statistics(
    draws: int, law: FloatArray, num: int, generator: np.random.Generator
) -> FloatArray:
    """Draw `num` tables under the null and return their X2 [num]."""
    law = law[law > 0]
    means = draws * law
    if draws == 0:
        return np.zeros(num)
    tables = generator.multinomial(draws, law, size=num).astype(np.float64)
    tables -= means
    tables *= tables
    statistics: FloatArray = tables @ (1 / means)
    return statistics


# How far from the null: total variation (TV) distance
#
# For counts drawn from a instead of p, X2 is about noncentral chi-squared with noncentrality N D, where
# D = sum (a - p)^2 / p. By Cauchy-Schwarz D >= (sum |a - p|)^2 = 4 TV^2, with equality when |a - p| / p is
# the same in every cell. With several tables of N_i draws, N D >= 4 N TV^2 holds with N = sum N_i and TV
# the mean of the tables' distances weighted by N_i.


def tv_upper_bound(statistic: float, df: int, draws: int, confidence: float = 0.99) -> float:
    """Return an upper confidence bound for the TV distance between a table's law and the expected one.

    The largest TV distance d for which X2 this small still had probability 1 - `confidence`, given that
    the noncentrality is at least 4 `draws` d^2. An X2 below its null mean `df` is taken as `df`, so that
    a lucky table does not print a bound near zero. At most 1.

    The bound is about the table as pooled: distances within a cell are invisible. It is conservative
    where the deviation is spread unevenly over the cells, and approximate, since the noncentral law is
    the limit for small deviations. Several tables: the mean distance, weighted by draws.

    References:
        Cochran, Annals of Mathematical Statistics 23 (1952).

    >>> round(tv_upper_bound(20.0, 20, 10_000), 4)
    0.0237
    """
    from scipy import stats

    if df < 1 or draws < 1:
        raise ValueError(f"nothing was tested: df {df}, draws {draws}")
    statistic = max(statistic, float(df))
    if not math.isfinite(statistic):
        return 1.0
    noncentrality = _where_it_crosses(lambda nc: float(stats.ncx2.cdf(statistic, df, nc)), 1 - confidence)
    return min(1.0, math.sqrt(noncentrality / (4 * draws)))


def smallest_detectable_tv(draws: int, df: int, alpha: float, power: float = 0.99) -> float | None:
    """Return the TV distance that the chi-squared test at level `alpha` finds with probability `power`.

    Any deviation of the pooled table of at least this TV distance would have been found at least that
    often; many smaller ones would have been too (those concentrated in rare cells). None when nothing
    is tested or not even a distance of 1 would be found so reliably.

    >>> round(smallest_detectable_tv(6_954, 20, alpha=1e-4), 4)
    0.05
    """
    if df < 1 or draws < 1:
        return None
    distance = math.sqrt(_needed_noncentrality(df, alpha, power) / (4 * draws))
    return distance if distance <= 1 else None


def draws_needed(tv: float, df: int, alpha: float, power: float = 0.99) -> int:
    """Return the draws with which the chi-squared test finds every TV distance of `tv` or more.

    >>> draws_needed(0.05, 20, alpha=1e-4)
    6955
    """
    return math.ceil(_needed_noncentrality(df, alpha, power) / (4 * tv * tv))


def _needed_noncentrality(df: int, alpha: float, power: float) -> float:
    """Return the noncentrality at which X2 passes the limit of the level-`alpha` test with `power`."""
    from scipy import stats

    limit = stats.chi2.isf(alpha, df)
    return _where_it_crosses(lambda nc: float(stats.ncx2.cdf(limit, df, nc)), 1 - power)


def _where_it_crosses(falling: Callable[[float], float], level: float) -> float:
    """Solve falling(x) = level for x >= 0; 0 when the function starts below the level."""
    from scipy import optimize

    if falling(0.0) <= level:
        return 0.0
    high = 1.0
    while falling(high) > level:
        high *= 2
    return float(optimize.brentq(lambda x: falling(x) - level, 0.0, high, xtol=1e-9))
