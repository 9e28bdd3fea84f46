"""The two-sample chi-squared test: its level, also with correlated samples, and its power."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest

from specbench import stats
from specbench.audit import two_sample
from specbench.audit.betting import FloatArray
from specbench.audit.two_sample import Arms, judge

ALPHA = 0.05
LAW = np.array([0.3, 0.25, 0.2, 0.15, 0.05, 0.03, 0.01, 0.01])


def draws(generator: np.random.Generator, law: FloatArray, num: int) -> list[int]:
    return [int(cell) for cell in generator.choice(len(law), num, p=law)]


def shifted(tv: float) -> FloatArray:
    """Return a law at some TV distance, spread over the common cells."""
    law = LAW.copy()
    law[[0, 1]] += tv / 2
    law[[2, 3]] -= tv / 2
    return law


def clustered(generator: np.random.Generator, requests: int, samples: int) -> tuple[list[int], list[int]]:
    """Return samples of requests whose samples often repeat the first, and the request of each."""
    cells, owners = [], []
    for request in range(requests):
        first = int(generator.choice(len(LAW), p=LAW))
        for _ in range(samples):
            cells.append(first if generator.random() < 0.5 else int(generator.choice(len(LAW), p=LAW)))
            owners.append(request)
    return cells, owners


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(two_sample).failed == 0


def test_the_level_holds_over_prompts_and_unequal_arms() -> None:
    """Two prompts, arms of unlike size, rare cells: p is at most .05 in 5 % of correct runs."""
    generator = np.random.default_rng(61)
    runs, alarms = 400, 0
    for _ in range(runs):
        prompts = [
            Arms(draws(generator, law, 150), draws(generator, law, 90))
            for law in (LAW, LAW[::-1] ** 0.5 / sum(LAW**0.5))
        ]
        p_value = judge(prompts, alpha=ALPHA, generator=generator).p_value
        assert p_value is not None
        alarms += p_value <= ALPHA
    deviation = 3 * math.sqrt(runs * ALPHA * (1 - ALPHA))
    assert runs * ALPHA - deviation <= alarms <= runs * ALPHA + deviation


def test_correlated_samples_need_their_requests() -> None:
    """Samples of a request that repeat one another break the level draw by draw, and keep it by request."""
    generator = np.random.default_rng(62)
    runs, by_draw, by_request = 200, 0, 0
    for _ in range(runs):
        on, on_requests = clustered(generator, 20, 8)
        off, off_requests = clustered(generator, 20, 8)
        aware = judge([Arms(on, off, on_requests, off_requests)], alpha=ALPHA, generator=generator)
        naive = judge([Arms(on, off)], alpha=ALPHA, generator=generator)
        assert aware.p_value is not None
        assert naive.p_value is not None
        by_draw += naive.p_value <= ALPHA
        by_request += aware.p_value <= ALPHA
        assert aware.statistic == pytest.approx(naive.statistic)
    assert by_request <= runs * ALPHA + 3 * math.sqrt(runs * ALPHA * (1 - ALPHA))
    assert by_draw > 4 * runs * ALPHA


def test_what_it_promises_it_finds() -> None:
    """At the smallest detectable distance all of 20 runs alarm at 1e-3, with twice the draws per arm."""
    generator = np.random.default_rng(63)
    tv, df = 0.15, 5
    distances = []
    per_arm = 2 * stats.draws_needed(tv, df, 1e-3)
    for _ in range(20):
        arms = Arms(draws(generator, shifted(tv), per_arm), draws(generator, LAW, per_arm))
        result = judge([arms], alpha=1e-3, generator=generator)
        assert result.component(0).alarm
        assert result.smallest_detectable_tv is not None
        assert result.smallest_detectable_tv == pytest.approx(tv, rel=0.12)  # df varies with the pooling
        assert result.tv_observed is not None
        distances.append(result.tv_observed)
    assert np.mean(distances) == pytest.approx(tv, abs=0.02)


def test_correlation_is_taken_off_the_draws() -> None:
    """The smallest detectable distance grows with the inflation of the permuted statistic."""
    generator = np.random.default_rng(64)
    on, on_requests = clustered(generator, 100, 8)
    off, off_requests = clustered(generator, 100, 8)
    aware = judge([Arms(on, off, on_requests, off_requests)], alpha=0.01, generator=generator)
    naive = judge([Arms(on, off)], alpha=0.01, generator=generator)
    assert aware.inflation is not None
    assert naive.inflation is not None
    assert naive.inflation == pytest.approx(1.0, abs=0.05)
    assert aware.inflation > 2
    assert aware.smallest_detectable_tv is not None
    assert naive.smallest_detectable_tv is not None
    assert aware.smallest_detectable_tv > 1.3 * naive.smallest_detectable_tv


def test_cells_are_pooled_by_both_arms_together() -> None:
    """Swapping the arms changes neither cells nor statistic; rare categories share one cell."""
    generator = np.random.default_rng(65)
    on, off = draws(generator, LAW, 100), draws(generator, LAW, 100)
    one = judge([Arms(on, off)], alpha=ALPHA, generator=generator)
    other = judge([Arms(off, on)], alpha=ALPHA, generator=generator)
    assert (one.df, one.tv_observed) == (other.df, other.tv_observed)
    assert one.statistic == pytest.approx(other.statistic)
    assert one.df < len(set(on + off)) - 1
    counts = np.bincount(on + off)
    assert one.df == np.count_nonzero(counts >= 20) - (counts[counts < 20].sum() < 20)


def test_the_statistic_is_that_of_a_contingency_table() -> None:
    """X2 is Pearson's for the two-row table of counts."""
    from scipy.stats import chi2_contingency

    on, off = ["a"] * 50 + ["b"] * 30 + ["c"] * 20, ["a"] * 30 + ["b"] * 30 + ["c"] * 60
    result = judge([Arms(on, off)], alpha=ALPHA, generator=np.random.default_rng(0))
    expected = chi2_contingency([[50, 30, 20], [30, 30, 60]], correction=False)
    assert result.statistic == pytest.approx(expected.statistic)
    assert result.df == expected.dof


def test_nothing_to_compare_is_not_a_pass() -> None:
    """One cell, or one arm alone, tests nothing."""
    generator = np.random.default_rng(66)
    for arms in (Arms(["a"] * 50, ["a"] * 50), Arms(["a"] * 50, []), Arms([], [])):
        result = judge([arms], alpha=ALPHA, generator=generator)
        component = result.component(50)
        assert (component.alarm, component.conclusive, component.evidence) == (False, False, None)
        assert result.smallest_detectable_tv is None


def test_what_cannot_be_read_is_refused() -> None:
    """Too few permutations for the level, or requests that do not match the draws."""
    arms = Arms(["a"], ["b"])
    with pytest.raises(ValueError, match="too few"):
        judge([arms], alpha=1e-3, generator=np.random.default_rng(0), resamples=99)
    with pytest.raises(ValueError, match="request numbers"):
        Arms(["a", "b"], ["a"], [1], [1])
