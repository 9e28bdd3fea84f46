"""Support: exact in float32, a margin otherwise, and the lumped law that leaves the other tests valid."""

from __future__ import annotations

import doctest
import math
from typing import Any

import numpy as np
import pytest
import torch

from specbench.audit import support
from specbench.audit.betting import FloatArray
from specbench.audit.reference import target_distribution
from specbench.audit.support import Margin, lump, zones
from specbench.records import SamplingParams

ALPHA = 0.05

SETTINGS: tuple[dict[str, Any], ...] = (
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 0.7, "top_k": 8, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 1.6, "top_p": 0.9, "top_k": 5, "order": ("top_p", "temperature", "min_p", "top_k")},
    {"temperature": 0.5, "min_p": 0.05, "order": ("min_p", "top_k", "top_p", "temperature")},
)


def logits(num: int, seed: int = 0, vocab: int = 12) -> FloatArray:
    return np.random.default_rng(seed).normal(0, 2, (num, vocab))


def sample(law: FloatArray, seed: int) -> FloatArray:
    draws = (np.random.default_rng(seed).random((len(law), 1)) > law.cumsum(1)).sum(1)
    return np.asarray(draws.clip(max=law.shape[1] - 1))


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(support).failed == 0


def test_one_token_outside_is_enough() -> None:
    """A single token of probability 0 alarms, its place is named, and a stream inside does not alarm."""
    p = np.array([[0.5, 0.5, 0.0]] * 5)
    inside, outside = support.exact(p, [0, 1, 0, 1, 1]), support.exact(p, [0, 1, 2, 2, 0])
    assert (inside.alarm, inside.evidence, inside.conclusive) == (False, 0.0, True)
    assert (outside.alarm, outside.evidence, outside.kind) == (True, 2.0, "exact")
    assert "the first is number 2" in outside.words
    assert not support.exact(np.empty((0, 3)), []).conclusive


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_without_a_margin_the_zones_are_the_oracles_support(setting: dict[str, Any]) -> None:
    """A token may be emitted exactly where the reference gives it some probability, for any order."""
    rows = logits(400)
    law = target_distribution(torch.from_numpy(rows), SamplingParams(**setting)).numpy()
    assert ((zones(rows, 0.0, **setting) >= 0) == (law > 0)).all()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_errors_up_to_the_margin_carry_no_token_across(setting: dict[str, Any]) -> None:
    """With every logit off by up to the margin, what is surely inside stays inside, and outside outside."""
    rows = logits(3000, seed=4)
    error = 0.02
    moved = rows + np.random.default_rng(5).uniform(-error, error, rows.shape)
    law = target_distribution(torch.from_numpy(moved), SamplingParams(**setting)).numpy()
    zone = zones(rows, error, **setting)
    assert (law[zone == 1] > 0).all()
    assert (law[zone == -1] == 0).all()
    near = (zone == 0).mean()
    assert 0 < near < 0.05
    crossed = (law > 0) != (zones(rows, 0.0, **setting) >= 0)
    assert crossed.any()


def test_forbidden_tokens_are_outside_whatever_the_margin() -> None:
    """What grammar or bias took away stays away, and what nothing limits is inside."""
    assert zones([[0.0, 1.0, -math.inf]], 5.0).tolist() == [[1, 1, -1]]
    assert zones([[0.0, 1.0, -math.inf]], 0.1, top_k=1).tolist() == [[-1, 1, -1]]


def test_lumping_keeps_the_law_of_what_is_lumped() -> None:
    """Lumped rows still sum to 1, and a lumped token has the lumped symbol's number, inside or out."""
    rows = logits(200, seed=6)
    law = target_distribution(torch.from_numpy(rows), SamplingParams(top_k=4)).numpy()
    zone = zones(rows, 0.2, top_k=4)
    near = zone == 0
    tokens = np.where(near.any(1), near.argmax(1), law.argmax(1))
    lumped, moved = lump(law, zone, tokens)
    assert lumped.sum(1) == pytest.approx(np.ones(200))
    assert (moved[near.any(1)] == 12).all()
    assert (moved[~near.any(1)] == tokens[~near.any(1)]).all()
    assert (lumped[:, :12][near] == 0).all()
    assert near.any()


def test_lumped_tokens_of_a_lossless_decoder_follow_the_lumped_law() -> None:
    """The share of the lumped symbol among sampled tokens is its mass."""
    rows = logits(20_000, seed=8)
    law = target_distribution(torch.from_numpy(rows), SamplingParams(top_k=4)).numpy()
    lumped, moved = lump(law, zones(rows, 0.3, top_k=4), sample(law, seed=7))
    mass = lumped[:, 12]
    z = ((moved == 12) - mass).sum() / math.sqrt((mass * (1 - mass)).sum())
    assert abs(z) < 3


def test_rounding_at_the_edge_does_not_alarm_but_another_top_k_does() -> None:
    """Sampling from noisy logits stays within a margin; sampling one rank too deep is found."""
    rows = logits(20_000, seed=10)
    noisy = rows + np.random.default_rng(9).normal(0, 0.02, rows.shape)
    zone = zones(rows, 0.1, top_k=4)
    for top_k, expected in ((4, False), (5, True)):
        law = target_distribution(torch.from_numpy(noisy), SamplingParams(top_k=top_k)).numpy()
        test = Margin(5e-5)
        test.add(zone[np.arange(20_000), sample(law, seed=11)])
        assert test.result().alarm is expected
        assert (test.strays > 0) is expected


def test_strays_at_the_null_rate_rarely_alarm() -> None:
    """Tokens beyond the margin as often as the null allows alarm in at most alpha of the runs."""
    generator = np.random.default_rng(12)
    runs, alarms = 400, 0
    for _ in range(runs):
        test = Margin(ALPHA)
        test.add(np.where(generator.random(10_000) < support.NULL_RATE, -1, 1))
        alarms += test.result().alarm
    assert alarms <= runs * ALPHA + 3 * math.sqrt(runs * ALPHA * (1 - ALPHA))


def test_what_does_not_fit_is_refused() -> None:
    """Shapes must match, and zones need a temperature and a margin."""
    with pytest.raises(ValueError, match="shape"):
        support.exact([[0.5, 0.5]], [0, 1])
    with pytest.raises(ValueError, match="temperature 0"):
        zones([[0.0, 1.0]], 0.1, temperature=0.0)
    with pytest.raises(ValueError, match="margin is"):
        zones([[0.0, 1.0]], -0.1)
