"""The paired test: valid with any reference, and as powerful as AUDIT.md says."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest

from specbench.audit import paired
from specbench.audit.betting import FloatArray
from specbench.audit.paired import SCORES_WITH_DRAFT, SCORES_WITHOUT_DRAFT, Paired, planned, token_scores

ALPHA = 0.05
SERVER_ALPHA = 0.6e-3
VOCAB = 64
LENGTH = 32
"""Tokens per request."""


def laws(generator: np.random.Generator, num: int) -> tuple[FloatArray, FloatArray]:
    """Return p and q along some texts, of a draft that is accepted two times in three."""
    logits = generator.normal(0, 2, (num, VOCAB))
    p, q = np.exp(logits), np.exp(logits + generator.normal(0, 1, (num, VOCAB)))
    return p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)


def sample(generator: np.random.Generator, law: FloatArray) -> FloatArray:
    draws = (generator.random((len(law), 1)) > law.cumsum(1)).sum(1)
    return np.asarray(draws.clip(max=law.shape[1] - 1))


def residual_from_p(p: FloatArray, q: FloatArray) -> FloatArray:
    """Return what is emitted if the recovered token comes from p itself."""
    kept = np.minimum(p, q)
    return np.asarray(kept + (1 - kept.sum(1, keepdims=True)) * p)


def scaled_ratio(p: FloatArray, q: FloatArray) -> FloatArray:
    """Return what is emitted if acceptance is min(1, 1.1 p / q)."""
    kept = np.minimum(q, 1.1 * p)
    rest = np.maximum(p - q, 0)
    return np.asarray(kept + (1 - kept.sum(1, keepdims=True)) * rest / rest.sum(1, keepdims=True))


def differences(
    generator: np.random.Generator, pairs: int, law: object = None, *, bad_reference: bool = False
) -> FloatArray:
    """Return S_on - S_off of requests of `LENGTH` tokens, summed, for a decoder that samples `law`."""
    p, q = laws(generator, pairs * LENGTH)
    on_law = law(p, q) if callable(law) else p
    scored = q if bad_reference else p
    draft = p if bad_reference else q
    arms = []
    for emitted_law in (on_law, p):
        scores = token_scores(scored, sample(generator, emitted_law), draft)
        arms.append(scores.reshape(pairs, LENGTH, -1).sum(1))
    return np.asarray(arms[0] - arms[1])


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(paired).failed == 0


@pytest.mark.parametrize("bad_reference", [False, True])
def test_equal_arms_rarely_alarm_whatever_the_reference(bad_reference: bool) -> None:
    """On and off alike alarm in at most alpha of the runs, also when scored by the wrong model."""
    generator = np.random.default_rng(51)
    runs, pairs = 40, 60
    values = differences(generator, runs * pairs, bad_reference=bad_reference).reshape(runs, pairs, -1)
    alarms = 0
    for run in values:
        test = Paired(ALPHA)
        test.add(run, tokens=pairs * LENGTH)
        alarms += test.result().alarm
    assert alarms <= runs * ALPHA + 3 * math.sqrt(runs * ALPHA * (1 - ALPHA))


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "rarely different"])
def test_symmetric_differences_rarely_alarm(kind: str) -> None:
    """Any symmetric law of the differences keeps the level: heavy tails, and pairs that are mostly equal."""
    generator = np.random.default_rng(52)
    runs, alarms = 1000, 0
    for _ in range(runs):
        values = (
            generator.standard_t(1.2, (150, 2)) if kind == "heavy tails" else generator.normal(size=(150, 2))
        )
        if kind == "rarely different":
            values *= generator.random((150, 2)) < 0.05
        test = Paired(ALPHA, SCORES_WITHOUT_DRAFT)
        test.add(values, tokens=0)
        alarms += test.result().alarm
    assert alarms <= runs * ALPHA + 3 * math.sqrt(runs * ALPHA * (1 - ALPHA))


def test_a_residual_from_p_is_found_in_some_2000_tokens_per_arm() -> None:
    """Every run of 12 000 tokens per arm alarms at the servers' level; the median takes 1500 to 3500."""
    generator = np.random.default_rng(53)
    needed = []
    for _ in range(11):
        test = Paired(SERVER_ALPHA)
        test.add(differences(generator, 12_000 // LENGTH, residual_from_p), tokens=12_000)
        assert test.mixture.alarm_at is not None
        needed.append((test.mixture.alarm_at + paired.CALIBRATION_PAIRS) * LENGTH)
        assert test.best.startswith(("lean, on above", "sign, on above"))
    assert 1500 < np.median(needed) < 3500


def test_a_scaled_ratio_is_found_in_part_of_the_runs() -> None:
    """1.1 p / q within 12 000 tokens per arm: in more than a quarter of the runs, and not in all."""
    generator = np.random.default_rng(54)
    found = 0
    for _ in range(14):
        test = Paired(SERVER_ALPHA)
        test.add(differences(generator, 12_000 // LENGTH, scaled_ratio), tokens=12_000)
        found += test.result().alarm
    assert 4 <= found < 14


def test_a_wrong_temperature_is_found_without_a_draft() -> None:
    """Requests answered at T 1.2 and audited as T 1 alarm by their surprisal alone: the servers' control."""
    generator = np.random.default_rng(55)
    p, _ = laws(generator, 100 * LENGTH)
    warm = p ** (1 / 1.2)
    warm /= warm.sum(1, keepdims=True)
    on, off = (token_scores(p, sample(generator, law)).reshape(100, LENGTH, 2).sum(1) for law in (warm, p))
    test = Paired(SERVER_ALPHA, SCORES_WITHOUT_DRAFT)
    test.add(on - off, tokens=100 * LENGTH)
    assert test.result().alarm
    assert test.best == "surprisal, on above off"


def test_the_first_pairs_only_set_the_scale() -> None:
    """Twenty pairs, however unlike, are no evidence; scaling all differences changes nothing."""
    values = np.full((60, 1), 3.0)
    few, one, other = (Paired(0.01, ["x"]) for _ in range(3))
    few.add(values[:20], tokens=1)
    assert not few.result().conclusive
    one.add(values, tokens=1)
    for value in values:
        other.add(1e-6 * value, tokens=1)
    assert one.mixture.log_e == pytest.approx(other.mixture.log_e)
    assert one.mixture.steps == 40


def test_scores_have_mean_zero_under_the_reference() -> None:
    """Each score's expectation over the emitted token is 0."""
    p, q = laws(np.random.default_rng(56), 1)
    everything = token_scores(np.repeat(p, VOCAB, 0), np.arange(VOCAB), np.repeat(q, VOCAB, 0))
    assert everything.shape == (VOCAB, len(SCORES_WITH_DRAFT))
    assert p[0] @ everything == pytest.approx(np.zeros(4), abs=1e-12)


# At a planned number of pairs


def test_the_planned_test_has_its_level() -> None:
    """Heavy-tailed symmetric differences give p at most .05 in at most 5 % of runs, and not far fewer."""
    generator = np.random.default_rng(57)
    runs, alarms = 1000, 0
    for _ in range(runs):
        values = generator.standard_t(2, (40, 3))
        alarms += planned(values, alpha=ALPHA, generator=generator, tokens=0).alarm
    deviation = 3 * math.sqrt(runs * ALPHA * (1 - ALPHA))
    assert runs * ALPHA - deviation <= alarms <= runs * ALPHA + deviation


def test_the_planned_test_finds_a_residual_from_p() -> None:
    """Its p-value is the smallest that its resamples allow."""
    generator = np.random.default_rng(58)
    values = differences(generator, 150, residual_from_p)
    result = planned(values, alpha=1e-3, generator=generator, tokens=150 * LENGTH)
    assert result.alarm
    assert result.evidence == pytest.approx(1 / 10_001)


def test_equal_pairs_are_not_a_pass() -> None:
    """Where every pair is equal, nothing was tested; where too few swaps are asked for, nothing can be."""
    generator = np.random.default_rng(59)
    result = planned(np.zeros((30, 2)), alpha=0.01, generator=generator, tokens=0)
    assert (result.alarm, result.conclusive) == (False, False)
    with pytest.raises(ValueError, match="too few"):
        planned(np.ones((30, 2)), alpha=1e-3, generator=generator, tokens=0, resamples=100)
    with pytest.raises(ValueError, match="finite"):
        Paired(0.01, ["x"]).add([[math.nan]], tokens=1)
