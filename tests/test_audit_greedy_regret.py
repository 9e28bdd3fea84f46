"""Greedy regret: near-ties are forgiven, wrong tokens are not, and noise above the cap is no verdict."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest

from specbench.audit import greedy_regret
from specbench.audit.betting import FloatArray
from specbench.audit.greedy_regret import (
    FEWEST_TOKENS,
    Divergence,
    GreedyRegret,
    Tolerance,
    divergence,
    regrets,
    tolerance,
)

ALPHA = 0.05
GOOD = Tolerance(1e-3, 1e-5, FEWEST_TOKENS, 1e-2)


def noisy_regrets(generator: np.random.Generator, num: int, noise: float) -> FloatArray:
    """Return the regrets of a decoder whose logits carry some noise, ties being common."""
    logits = generator.normal(0, 2, (num, 8))
    tokens = (logits + generator.normal(0, noise, logits.shape)).argmax(1)
    return regrets(logits, tokens)


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(greedy_regret).failed == 0


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_a_decoder_as_noisy_as_ordinary_decoding_rarely_alarms(dtype: str, noise: float) -> None:
    """With a tolerance measured on ordinary decoding, at most alpha of the correct runs alarm."""
    generator = np.random.default_rng(41)
    limit = tolerance(noisy_regrets(generator, FEWEST_TOKENS, noise), dtype=dtype)
    assert limit.conclusive
    runs, alarms = 200, 0
    for _ in range(runs):
        test = GreedyRegret(ALPHA, limit)
        test.add(noisy_regrets(generator, 2000, noise))
        alarms += test.result().alarm
    assert alarms <= runs * ALPHA + 3 * math.sqrt(runs * ALPHA * (1 - ALPHA))


def test_a_draft_token_let_through_now_and_then_is_found() -> None:
    """One wrong token in 200, of some regret, alarms at 5e-5 within 5000 tokens."""
    generator = np.random.default_rng(42)
    values = noisy_regrets(generator, 5000, 1e-5)
    values[::200] = 0.7
    test = GreedyRegret(5e-5, GOOD)
    test.add(values)
    assert test.result().alarm
    assert "25 of 5000" in test.result().words


def test_the_tolerance_has_a_floor_and_a_cap() -> None:
    """Tiny noise gives the floor; noise above the cap is inconclusive, whatever was emitted."""
    assert tolerance(np.zeros(FEWEST_TOKENS), dtype="float32").value == 1e-3
    measured = tolerance(np.full(FEWEST_TOKENS, 2e-3), dtype="float32")
    assert measured.value == pytest.approx(8e-3)
    assert measured.conclusive
    loud = tolerance(np.full(FEWEST_TOKENS, 0.01), dtype="float32")
    assert not loud.conclusive
    assert tolerance(np.full(FEWEST_TOKENS, 0.01), dtype="bfloat16").conclusive
    test = GreedyRegret(5e-5, loud)
    test.add([5.0] * 100)
    result = test.result()
    assert (result.alarm, result.conclusive) == (False, False)
    assert "ordinary decoding itself" in result.words


def test_few_tokens_make_no_tolerance() -> None:
    """A quantile of .9999 needs 100 000 tokens."""
    few = tolerance(np.zeros(FEWEST_TOKENS - 1), dtype="float32")
    assert not few.conclusive
    result = GreedyRegret(5e-5, few).result()
    assert not result.conclusive
    assert "99999 tokens" in result.words


def test_divergences_are_classed_by_both_logits() -> None:
    """A difference within the tolerance is a near-tie, any other is real, an early end is its length."""
    logits = [[0.0, 5.0, 1.0], [2.0, 2.0005, 0.0], [9.0, 0.0, 0.0]]
    assert divergence([1, 0, 0], [1, 1, 2], logits, GOOD) == Divergence(
        1, "near-tie", (0, 1), (2.0, 2.0005), 2.0005
    )
    real = divergence([1, 2, 0], [1, 1, 0], logits, GOOD)
    assert real == Divergence(1, "real", (2, 1), (0.0, 2.0005), 2.0005)
    short = divergence([1, 1], [1, 1, 0], logits, GOOD)
    assert short == Divergence(2, "length", (None, 0), None, None)
    assert divergence([1, 1, 0], [1, 1, 0], logits, GOOD) is None


def test_two_wrong_tokens_that_tie_with_one_another_are_real() -> None:
    """Both outputs are compared with the largest logit, not with each other."""
    found = divergence([0], [1], [[1.0, 1.0, 4.0]], GOOD)
    assert found is not None
    assert found.kind == "real"


def test_what_is_no_number_is_refused() -> None:
    """Logits without a finite maximum and negative regrets are mistakes of the caller."""
    with pytest.raises(ValueError, match="not finite"):
        regrets([[math.nan, 1.0]], [0])
    with pytest.raises(ValueError, match="not finite"):
        divergence([0], [1], [[math.inf, 1.0]], GOOD)
    with pytest.raises(ValueError, match="negative"):
        GreedyRegret(ALPHA, GOOD).add([-1.0])
    with pytest.raises(ValueError, match="one or more regrets"):
        tolerance([], dtype="float32")
