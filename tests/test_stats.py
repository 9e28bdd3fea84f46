"""Paired speedups, shares, and the chi-squared test: its level, its power and its bounds, by simulation."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from specbench import stats

TIMES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4)


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(stats).failed == 0


# Speedups and shares


def test_repeats_are_paired_within_a_prompt() -> None:
    """A repeat in which the machine was slow for both sides does not move the ratio."""
    baseline = {"a": [1.0, 10.0, 1.0], "b": [4.0, 4.0, 40.0]}
    candidate = {"a": [0.5, 5.0, 0.5], "b": [1.0, 1.0, 10.0]}
    speedup = stats.paired_speedup(baseline, candidate)
    assert speedup is not None
    assert speedup.value == pytest.approx(math.sqrt(2 * 4))
    assert speedup.num == 2


def test_a_lost_repeat_falls_back_to_the_ratio_of_medians() -> None:
    """With unequal numbers of repeats the prompt's ratio is median over median."""
    speedup = stats.paired_speedup({"a": [1.0, 3.0, 9.0]}, {"a": [1.5]})
    assert speedup is not None
    assert speedup.value == pytest.approx(2.0)
    assert (speedup.low, speedup.high, speedup.num) == (None, None, 1)


def test_prompts_without_a_partner_are_left_out() -> None:
    """Nothing in common is None, not a speedup of 0 or 1."""
    assert stats.paired_speedup({"a": [1.0]}, {"b": [1.0]}) is None
    assert stats.paired_speedup({"a": [1.0]}, {"a": []}) is None
    assert stats.paired_speedup({}, {}) is None


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_impossible_times_are_refused(bad: float) -> None:
    """A time that is not a positive number is an error, not a ratio."""
    with pytest.raises(ValueError, match="positive"):
        stats.paired_speedup({"a": [bad]}, {"a": [1.0]})


@given(st.dictionaries(st.text(max_size=2), st.tuples(TIMES, TIMES), min_size=1, max_size=5))
def test_swapping_the_sides_gives_the_reciprocal(times: dict[str, tuple[list[float], list[float]]]) -> None:
    """Neither the estimate nor the interval prefers a side."""
    baseline = {key: pair[0] for key, pair in times.items()}
    candidate = {key: pair[1] for key, pair in times.items()}
    forward = stats.paired_speedup(baseline, candidate, resamples=50)
    backward = stats.paired_speedup(candidate, baseline, resamples=50)
    assert forward is not None
    assert backward is not None
    assert forward.value * backward.value == pytest.approx(1.0)
    if forward.low is not None and forward.high is not None and backward.high is not None:
        assert forward.low <= forward.high
        assert forward.low * backward.high == pytest.approx(1.0)


def test_the_bootstrap_interval_covers_the_truth() -> None:
    """With 20 prompts the 95 % interval covers the true speedup in about 93 % of experiments."""
    generator = np.random.default_rng(1)
    covered = 0
    for experiment in range(200):
        log_ratios = generator.normal(math.log(1.5), 0.3, 20)
        candidate = {str(prompt): [math.exp(-ratio)] for prompt, ratio in enumerate(log_ratios)}
        baseline = {key: [1.0] for key in candidate}
        interval = stats.paired_speedup(baseline, candidate, seed=experiment, resamples=300)
        assert interval is not None
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low < 1.5 < interval.high
    assert 0.87 <= covered / 200 <= 0.98


@given(st.integers(1, 500), st.data())
def test_wilson_agrees_with_scipy(trials: int, data: st.DataObject) -> None:
    """Wilson's interval is the one scipy computes."""
    successes = data.draw(st.integers(0, trials))
    interval = stats.wilson(successes, trials)
    expected = reference.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert stats.wilson(0, 0) is None


# The chi-squared test


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.floats(0.1, 40))
def test_pooling_keeps_every_category_and_the_minimum(expected: list[float], minimum: float) -> None:
    """Cells are numbered without a gap, and each but an only one expects the minimum."""
    labels = stats.pool_by_expected(expected, minimum)
    cells = np.bincount(labels, weights=expected)
    assert sorted(set(labels.tolist())) == list(range(len(cells)))
    assert len(cells) == 1 or cells.min() >= minimum * (1 - 1e-12)
    assert cells.sum() == pytest.approx(sum(expected))


def test_a_short_tail_joins_the_smallest_cell() -> None:
    """A tail below the minimum is not a cell of its own."""
    assert stats.pool_by_expected([40.0, 12.0, 4.0, 4.0]).tolist() == [0, 1, 1, 1]
    assert stats.pool_by_expected([40.0, 12.0, 4.0, 6.0]).tolist() == [0, 1, 2, 2]
    assert stats.pool_by_expected([4.0, 3.0]).tolist() == [0, 0]


def test_the_statistic_and_tail_agree_with_scipy() -> None:
    """X2 and its large-sample p-value are scipy's; an impossible count makes X2 infinite."""
    observed, expected = [18, 30, 52], [20.0, 20.0, 60.0]
    by_scipy = reference.chisquare(observed, expected)
    statistic = stats.chi_squared_statistic(observed, expected)
    assert statistic == pytest.approx(by_scipy.statistic)
    assert stats.tail_p_value(statistic, 2) == pytest.approx(by_scipy.pvalue)
    assert stats.chi_squared_statistic([1, 1], [2.0, 0.0]) == math.inf
    assert stats.chi_squared_statistic([2, 0], [2.0, 0.0]) == 0.0


def test_monte_carlo_agrees_with_the_tail_where_that_holds() -> None:
    """With large counts the simulated p-value is the chi-squared tail, summed over tables."""
    laws = [np.full(4, 0.25), np.array([0.2, 0.3, 0.5])]
    counts = [np.array([280, 230, 240, 250]), np.array([180, 320, 500])]
    statistic = sum(
        stats.chi_squared_statistic(table, 1000 * law) for table, law in zip(counts, laws, strict=True)
    )
    p_value = stats.monte_carlo_p_value(
        counts, laws, generator=np.random.default_rng(0), alpha=0.001, resamples=40_000
    )
    assert p_value == pytest.approx(stats.tail_p_value(statistic, 5), rel=0.2)


def test_monte_carlo_counts_ties_as_exceedances() -> None:
    """With three draws of a fair coin, X2 of (2, 1) is the least possible, so p is 1."""
    p_value = stats.monte_carlo_p_value(
        [[2, 1]], [[0.5, 0.5]], generator=np.random.default_rng(0), alpha=0.05
    )
    assert p_value == 1.0


def test_too_few_resamples_are_refused() -> None:
    """A p-value that cannot get well below alpha is not computed."""
    with pytest.raises(ValueError, match="at least 1000"):
        stats.monte_carlo_p_value(
            [[1]], [[1.0]], generator=np.random.default_rng(0), alpha=0.01, resamples=999
        )


def test_the_sequential_p_value_keeps_its_level_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping early leaves P(p <= a) <= a for every a, also with cells where the tail formula fails."""
    monkeypatch.setattr(stats, "STOP_AFTER_EXCEEDANCES", 5)
    generator = np.random.default_rng(5)
    law = np.array([0.9, 0.05, 0.03, 0.02])
    p_values = np.array(
        [
            stats.monte_carlo_p_value([generator.multinomial(60, law)], [law], generator=generator, alpha=0.1)
            for _ in range(3000)
        ]
    )
    for level in (0.01, 0.05, 0.1, 0.3, 0.5, 0.8):
        assert np.mean(p_values <= level) <= level + 3 * math.sqrt(level * (1 - level) / 3000)


# Distances


def test_the_figures_of_the_audit_hold() -> None:
    """At alpha 1e-4 and 20 degrees of freedom: 7.0k draws for TV .05, 43.5k for .02."""
    assert round(stats.draws_needed(0.05, 20, 1e-4), -2) == 7000
    assert round(stats.draws_needed(0.02, 20, 1e-4), -2) == 43500


@given(st.floats(0.003, 0.5), st.integers(1, 200), st.sampled_from([1e-2, 1e-4, 1e-6]))
def test_draws_needed_inverts_the_detectable_distance(tv: float, df: int, alpha: float) -> None:
    """With the draws that a distance needs, that distance is detectable, and with one fewer it is not."""
    draws = stats.draws_needed(tv, df, alpha)
    detectable = stats.smallest_detectable_tv(draws, df, alpha)
    assert detectable is not None
    assert detectable <= tv * (1 + 1e-9)
    fewer = stats.smallest_detectable_tv(draws - 1, df, alpha)
    assert fewer is None or fewer > tv * (1 - 1e-9)


def test_what_cannot_be_detected_is_none() -> None:
    """Without draws, without degrees of freedom or with too few draws there is no detectable distance."""
    assert stats.smallest_detectable_tv(0, 5, 0.01) is None
    assert stats.smallest_detectable_tv(100, 0, 0.01) is None
    assert stats.smallest_detectable_tv(5, 5, 0.01) is None


def _opposed(law: np.ndarray, strength: float) -> np.ndarray:
    """Return the alternative that X2 finds hardest at its distance, strength / 2: |a - p| / p is constant."""
    assert law[::2].sum() == pytest.approx(0.5)
    return law * np.where(np.arange(len(law)) % 2, 1 - strength, 1 + strength)


@pytest.mark.parametrize("strength", [0.0, 0.02, 0.1, 0.4])
@pytest.mark.parametrize("draws", [500, 5000])
def test_the_upper_bound_covers(strength: float, draws: int) -> None:
    """The 99 % bound lies below the true distance in at most about 1 % of experiments."""
    generator = np.random.default_rng(7)
    law = np.repeat([0.15, 0.1, 0.1, 0.05, 0.05, 0.05], 2)
    alternative = _opposed(law, strength)
    misses = 0
    for counts in generator.multinomial(draws, alternative, size=400):
        statistic = stats.chi_squared_statistic(counts, draws * law)
        misses += stats.tv_upper_bound(statistic, len(law) - 1, draws) < strength / 2
    assert misses <= 4 + 3 * math.sqrt(4)


def test_extreme_statistics_have_finite_bounds() -> None:
    """The bound is at most 1, and a lucky X2 of 0 is bounded like its null mean."""
    assert stats.tv_upper_bound(math.inf, 5, 100) == 1.0
    assert stats.tv_upper_bound(1e7, 5, 100) == 1.0
    assert stats.tv_upper_bound(0.0, 5, 100) == stats.tv_upper_bound(5.0, 5, 100) > 0
    with pytest.raises(ValueError, match="nothing was tested"):
        stats.tv_upper_bound(0.0, 0, 100)
