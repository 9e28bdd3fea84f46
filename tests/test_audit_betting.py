"""The average of e-processes: its running maximum, and what it refuses."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest

from specbench.audit import betting
from specbench.audit.betting import RARE_RATES, Mixture, rare_event_factors, rare_event_mixture

ALPHA = 0.05
RUNS = 2000


def limit(runs: int = RUNS, alpha: float = ALPHA) -> float:
    """Return the most alarms among correct runs: alpha, and three standard deviations."""
    return runs * alpha + 3 * math.sqrt(runs * alpha * (1 - alpha))


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(betting).failed == 0


def test_an_alarm_stays_when_the_evidence_is_lost_again() -> None:
    """Ville's inequality is about the maximum; where it was first reached is remembered, chunks or not."""
    whole, chunked = Mixture(["a"], 0.1), Mixture(["a"], 0.1)
    factors = np.array([1.0, 1.0, 1.0, -2.0, -2.0])
    whole.multiply(factors[:, None])
    for factor in factors:
        chunked.multiply([[factor]])
    for mixture in (whole, chunked):
        assert mixture.alarm
        assert mixture.alarm_at == 3
        assert mixture.peak == pytest.approx(3.0)
        assert mixture.log_e.tolist() == pytest.approx([-1.0])


def test_the_average_is_of_e_values_not_of_their_logarithms() -> None:
    """One dead bet halves the evidence of two, and no more."""
    mixture = Mixture(["dead", "alive"], 0.01)
    mixture.multiply([[-math.inf, 3.0], [-1.0, 3.0]])
    assert mixture.peak == pytest.approx(6.0 - math.log(2))
    assert mixture.best == "alive"


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_no_evidence_without_a_number(factor: float) -> None:
    """A factor that is not a number, or infinite, is refused rather than taken for evidence."""
    with pytest.raises(ValueError, match="log factor"):
        Mixture(["a"], 0.01).multiply([[factor]])


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1])
def test_a_level_is_between_0_and_1(alpha: float) -> None:
    """A level that never or always alarms is a mistake of the caller."""
    with pytest.raises(ValueError, match="alpha"):
        Mixture(["a"], alpha)


def test_nothing_tested_is_inconclusive() -> None:
    """A component without a single step has no evidence."""
    result = Mixture(["a"], 0.01).component("x", 0, found="", quiet="")
    assert (result.alarm, result.evidence, result.conclusive) == (False, None, False)


def test_rare_events_at_the_null_rate_rarely_alarm() -> None:
    """At a rate of exactly the null's, the share of alarms stays below alpha."""
    generator = np.random.default_rng(1)
    alarms = 0
    for _ in range(400):
        mixture = rare_event_mixture(ALPHA)
        mixture.multiply(rare_event_factors(generator.random(3000) < 1e-2, 1e-2))
        alarms += mixture.alarm
    assert alarms <= limit(400)


def test_rare_event_factors_have_mean_one() -> None:
    """Under the null the expected factor of each bet is 1."""
    happens, stays = np.exp(rare_event_factors([True, False], 1e-4))
    assert 1e-4 * happens + (1 - 1e-4) * stays == pytest.approx(np.ones(len(RARE_RATES)))


def test_a_handful_of_strays_in_a_thousand_alarms() -> None:
    """Where one in ten thousand is expected, four in 700 are too many at 5e-5."""
    mixture = rare_event_mixture(5e-5)
    events = np.zeros(1000, dtype=bool)
    events[[100, 300, 500, 700, 900]] = True
    mixture.multiply(rare_event_factors(events, 1e-4))
    assert mixture.alarm_at == 701  # the fourth
