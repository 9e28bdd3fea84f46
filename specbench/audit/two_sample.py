"""Chi-squared of a strategy's continuations against target-only draws, where the exact law is not known."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specbench import stats
from specbench.audit.betting import FloatArray
from specbench.audit.verdicts import ComponentResult

MINIMUM_COMBINED = 20.0
FIRST_PERMUTATIONS = 2000  # mostly enough where there is nothing to find
CHUNK_VALUES = 4_000_000  # most counts held at a time


@dataclass(frozen=True, slots=True)
class Arms:
    """What both arms drew after one branch prompt: whole continuations, or any other categories.

    `on_requests` and `off_requests` say which request each draw belongs to. None: each is its own, drawn
    with a seed of its own.
    """

    on: Sequence[Hashable]
    off: Sequence[Hashable]
    on_requests: Sequence[int] | None = None
    off_requests: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Check that each draw has its request."""
        for draws, requests in ((self.on, self.on_requests), (self.off, self.off_requests)):
            if requests is not None and len(requests) != len(draws):
                raise ValueError(f"{len(draws)} draws, but {len(requests)} request numbers")


@dataclass(frozen=True, slots=True)
class TwoSampleResult:
    """What the test found, over all branch prompts together; None where nothing could be tested.

    `tv_observed` is the distance between the two pooled tables, the mean over prompts weighted by draws;
    `tv_by_chance` is what it is on average when labels are swapped, which is what to compare it with.
    `smallest_detectable_tv` is the distance found with probability .99 at `alpha`; twice the one-sample
    draws are needed in each arm for it. `inflation` is the mean of the permuted statistic over its degrees of
    freedom, well above 1 when draws of one request are alike, and then taken off the draws.
    """

    statistic: float | None
    df: int
    p_value: float | None
    alpha: float
    on_draws: int
    off_draws: int
    prompts: int
    tv_observed: float | None
    tv_by_chance: float | None
    inflation: float | None
    smallest_detectable_tv: float | None

    def component(self, tokens: int, name: str = "chi-squared") -> ComponentResult:
        """Return the result in the form of a component."""
        if self.p_value is None:
            words = "no prompt has two cells with enough draws: nothing was tested"
            return ComponentResult(name, False, None, "p", self.alpha, tokens, words, conclusive=False)
        words = (
            f"X2 = {self.statistic:.1f} with {self.df} degrees of freedom, p = {self.p_value:.2g}; "
            f"TV {self.tv_observed:.3f}, by chance {self.tv_by_chance:.3f}"
        )
        return ComponentResult(name, self.p_value <= self.alpha, self.p_value, "p", self.alpha, tokens, words)


@dataclass(frozen=True, slots=True)
class _Table:
    """One prompt: counts per request and cell [requests, cells], the first `on` requests being of arm on."""

    counts: FloatArray
    on: int
    separate: bool  # every request is one draw

    @property
    def totals(self) -> FloatArray:
        return np.asarray(self.counts.sum(0))

    @property
    def effective(self) -> float:
        on, off = self.counts[: self.on].sum(), self.counts[self.on :].sum()
        return float(on * off / (on + off))


def judge(
    prompts: Sequence[Arms],
    *,
    alpha: float,
    generator: np.random.Generator,
    resamples: int | None = None,
    minimum_combined: float = MINIMUM_COMBINED,
) -> TwoSampleResult:
    """Test whether both arms draw from one law after each branch prompt.

    Null hypothesis: for each prompt the requests of both arms are exchangeable. Cells are pooled by the
    count of both arms together, which swapping labels leaves as it is; the statistic is the two-sample X2
    summed over prompts; the p-value (add-one) is its place among those with labels swapped at random,
    within prompts and by whole requests, ended early where there is nothing to find (as in
    `stats.monte_carlo_p_value`). Samples of one request may therefore be correlated, when the arms say which
    request each belongs to.

    Invalid when both arms share seeds, when draws were dropped for how they turned out, or when evaluated
    more than once. Not rejecting does not show that the laws are equal: `smallest_detectable_tv` says what
    could have gone unnoticed, and differences within a pooled cell are invisible.

    Args:
        prompts: Both arms' draws per prompt. A prompt that only one arm has tests nothing.
        alpha: Its share of the error budget; one decision for all prompts.
        generator: Of the permutations.
        resamples: At least 10 / alpha, the default.
        minimum_combined: Least count of a cell, both arms together.

    References:
        Pearson, Biometrika 8 (1911), on two samples; Good, Permutation, Parametric and Bootstrap Tests of
        Hypotheses (2005); arXiv 2410.20247 for the setting.

    >>> arms = Arms(on=["a"] * 70 + ["b"] * 30, off=["a"] * 40 + ["b"] * 60)
    >>> result = judge([arms], alpha=0.01, generator=np.random.default_rng(0))
    >>> (round(result.statistic, 2), result.df, round(result.tv_observed, 2), result.p_value <= 0.01)
    (18.18, 1, 0.3, True)
    """
    needed = math.ceil(10 / alpha - 1e-6)
    resamples = needed if resamples is None else resamples
    if resamples < needed:
        raise ValueError(f"{resamples} resamples are too few to read p at {alpha:g}; expected {needed}")
    tables = [_table(arms, minimum_combined) for arms in prompts if len(arms.on) and len(arms.off)]
    tested = [table for table in tables if table.counts.shape[1] > 1]
    df = stats.degrees_of_freedom([table.counts.shape[1] for table in tested])
    statistic = p_value = observed_tv = chance_tv = inflation = smallest = None
    if tested:
        draws = sum(table.effective for table in tested)
        statistic, distance = 0.0, 0.0
        for table in tested:
            x2, tv = _compare(table.counts[: table.on].sum(0)[None], table.totals)
            statistic += float(x2[0])
            distance += table.effective * float(tv[0])
        observed_tv = distance / draws
        permuted = _permute(tested, statistic, resamples, generator)
        p_value, chance_tv = permuted.p_value, permuted.mean_tv
        inflation = permuted.mean_statistic / df
        smallest = stats.smallest_detectable_tv(int(draws / max(1.0, inflation)), df, alpha)
    return TwoSampleResult(
        statistic=statistic,
        df=df,
        p_value=p_value,
        alpha=alpha,
        on_draws=sum(len(arms.on) for arms in prompts),
        off_draws=sum(len(arms.off) for arms in prompts),
        prompts=len(tested),
        tv_observed=observed_tv,
        tv_by_chance=chance_tv,
        inflation=inflation,
        smallest_detectable_tv=smallest,
    )


def _table(arms: Arms, minimum: float) -> _Table:
    """Count one prompt's draws per request and pooled cell."""
    numbers: dict[Hashable, int] = {}
    columns = np.array([numbers.setdefault(draw, len(numbers)) for draw in (*arms.on, *arms.off)])
    labels = stats.pool_by_expected(np.bincount(columns).astype(np.float64), minimum)
    requests: dict[tuple[str, int], int] = {}
    rows = []
    for arm, draws, owners in (("on", arms.on, arms.on_requests), ("off", arms.off, arms.off_requests)):
        for owner in range(len(draws)) if owners is None else owners:
            rows.append(requests.setdefault((arm, owner), len(requests)))
    counts = np.zeros((len(requests), int(labels.max()) + 1))
    np.add.at(counts, (np.array(rows), labels[columns]), 1.0)
    on = sum(arm == "on" for arm, _ in requests)
    return _Table(counts, on, separate=len(requests) == len(columns))


def _compare(on: FloatArray, totals: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the two-sample X2 and the TV distance of some splits of a table's totals [splits, cells]."""
    off = totals - on
    on_draws, off_draws = on.sum(1, keepdims=True), off.sum(1, keepdims=True)
    difference = on / on_draws - off / off_draws
    weight = (on_draws * off_draws)[:, 0]
    x2 = weight * (difference**2 / totals).sum(1)
    return np.asarray(x2), np.asarray(np.abs(difference).sum(1) / 2)


@dataclass(frozen=True, slots=True)
class _Permuted:
    p_value: float
    mean_statistic: float
    mean_tv: float


def _permute(
    tables: Sequence[_Table], statistic: float, resamples: int, generator: np.random.Generator
) -> _Permuted:
    """Swap labels until enough permuted statistics have reached the observed one, or `resamples` times."""
    widest = max(table.counts.shape[1] if table.separate else max(table.counts.shape) for table in tables)
    effective = sum(table.effective for table in tables)
    exceedances, x2_sum, tv_sum, done = 0, 0.0, 0.0, 0
    p_value: float | None = None
    while done < resamples and p_value is None:
        chunk = min(resamples - done, FIRST_PERMUTATIONS if not done else max(1, CHUNK_VALUES // widest))
        x2, tv = np.zeros(chunk), np.zeros(chunk)
        for table in tables:
            one_x2, one_tv = _compare(_splits(table, chunk, generator), table.totals)
            x2 += one_x2
            tv += one_tv * table.effective / effective
        places = np.flatnonzero(x2 >= statistic * (1 - 1e-12))
        if exceedances + len(places) >= stats.STOP_AFTER_EXCEEDANCES:
            last = int(places[stats.STOP_AFTER_EXCEEDANCES - exceedances - 1])
            p_value = stats.STOP_AFTER_EXCEEDANCES / (done + last + 1)
        exceedances += len(places)
        x2_sum += float(x2.sum())
        tv_sum += float(tv.sum())
        done += chunk
    p_value = (1 + exceedances) / (1 + resamples) if p_value is None else p_value
    return _Permuted(p_value, x2_sum / done, tv_sum / done)


def _splits(table: _Table, num: int, generator: np.random.Generator) -> FloatArray:
    """Return the counts of arm on after `num` random swaps of labels [num, cells]."""
    if table.separate:  # the same law, without going through each draw
        colors = table.totals.astype(np.int64)
        return generator.multivariate_hypergeometric(colors, table.on, size=num).astype(np.float64)
    labels: npt.NDArray[np.float64] = np.zeros((num, len(table.counts)))
    labels[:, : table.on] = 1.0
    return np.asarray(generator.permuted(labels, axis=1) @ table.counts)
