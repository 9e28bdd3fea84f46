"""Collisions: correct streams rarely alarm, copied completions always do."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest

from specbench.audit import collisions
from specbench.audit.collisions import Collisions

ALPHA = 0.05


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(collisions).failed == 0


def test_independent_completions_rarely_alarm() -> None:
    """Three prompts of uneven laws, so that completions repeat by chance; at most alpha of the runs alarm."""
    generator = np.random.default_rng(11)
    runs, alarms, repeats = 600, 0, 0
    for _ in range(runs):
        laws = [generator.dirichlet(np.full(size, 0.5)) for size in (4, 12, 40)]
        streams = Collisions(ALPHA)
        for _ in range(8):
            for prompt, law in enumerate(laws):
                completion = int(generator.choice(len(law), p=law))
                streams.add(prompt, (completion,), math.log(law[completion]))
        alarms += streams.result().alarm
        repeats += streams.repeats
    assert repeats > 5 * runs
    assert alarms <= runs * ALPHA + 3 * math.sqrt(runs * ALPHA * (1 - ALPHA))


def test_one_in_a_hundred_copied_is_found() -> None:
    """1 % copied among 600 completions of some 25 tokens each (log probability -32) alarm in every run."""
    generator = np.random.default_rng(12)
    for _ in range(20):
        streams = Collisions(1e-4)
        made: list[int] = []
        for number in range(600):
            copied = made and generator.random() < 0.01
            made.append(int(generator.choice(made)) if copied else number)
            streams.add("prompt", (made[-1],), -32.0)
        assert streams.repeats
        assert streams.result().alarm


def test_one_stream_for_two_requests_is_found_at_once() -> None:
    """Requests that share a stream in pairs alarm at the first pair."""
    streams = Collisions(1e-4)
    for number in range(6):
        streams.add("prompt", (number // 2, 1, 2), -25.0)
    assert streams.mixture.alarm_at == 1  # the first completion has nothing before it: its factor is no step


def test_the_same_text_after_another_prompt_is_no_collision() -> None:
    """Only completions of one prompt are compared."""
    streams = Collisions(1e-4)
    for prompt in range(20):
        streams.add(prompt, (1, 2, 3), -30.0)
    assert streams.repeats == 0
    assert not streams.result().conclusive


def test_certain_completions_carry_no_evidence() -> None:
    """Where the target has one thing to say, everyone says it."""
    streams = Collisions(1e-4)
    for _ in range(200):
        streams.add("prompt", (1, 2, 3), 0.0)
    assert streams.mixture.peak == pytest.approx(0.0, abs=1e-9)


def test_factors_have_mean_one_under_the_law() -> None:
    """The expectation over the next completion of each factor is 1, computed exactly."""
    law = np.array([0.6, 0.3, 0.1])
    factors = []
    for completion in range(3):
        streams = Collisions(1e-4)
        for earlier in (0, 0, 1):
            streams.add("prompt", (earlier,), math.log(law[earlier]))
        before = streams.mixture.log_e.copy()
        streams.add("prompt", (completion,), math.log(law[completion]))
        factors.append(np.exp(streams.mixture.log_e - before))
    assert law @ np.array(factors) == pytest.approx(np.ones(4))


def test_an_impossible_completion_is_left_to_the_support_test() -> None:
    """A log probability of -inf changes nothing, and NaN or a positive one is refused."""
    streams = Collisions(1e-4)
    for _ in range(3):
        streams.add("prompt", (1,), -math.inf)
    assert not streams.result().alarm
    for wrong in (math.nan, 0.5):
        with pytest.raises(ValueError, match="log_p"):
            streams.add("prompt", (1,), wrong)
