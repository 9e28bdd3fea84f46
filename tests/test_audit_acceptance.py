"""Acceptance: correct coins rarely alarm under any rule, scaled ratios and miscounts do."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest

from specbench.audit import acceptance
from specbench.audit.acceptance import BlockAcceptance, TokenAcceptance, block_expectation, probability
from specbench.audit.betting import FloatArray

ALPHA = 0.05


def allowed(runs: int) -> float:
    """Return the most alarms among correct runs: alpha, and three standard deviations."""
    return runs * ALPHA + 3 * math.sqrt(runs * ALPHA * (1 - ALPHA))


def drafted(generator: np.random.Generator, num: int, vocab: int = 16) -> tuple[FloatArray, FloatArray]:
    """Return p and q of tokens drawn from q, a good draft's."""
    logits = generator.normal(0, 1.5, (num, vocab))
    q = np.exp(logits + generator.normal(0, 0.7, (num, vocab)))
    p = np.exp(logits)
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    tokens = (generator.random((num, 1)) > q.cumsum(1)).sum(1).clip(max=vocab - 1)
    return p[np.arange(num), tokens], q[np.arange(num), tokens]


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(acceptance).failed == 0


def test_correct_coins_rarely_alarm() -> None:
    """Under token-wise acceptance with the right probability at most alpha of the runs alarm."""
    generator = np.random.default_rng(21)
    runs, alarms = 500, 0
    for _ in range(runs):
        p, q = drafted(generator, 300)
        coins = TokenAcceptance(ALPHA, tolerance=0.0)
        coins.add(generator.random(300) < probability(p, q), p, q)
        alarms += coins.result().alarm
    assert alarms <= allowed(runs)


def test_every_bet_has_a_mean_of_at_most_one() -> None:
    """For any chance within the tolerance the expected factor of each bet is at most 1, also at 0 and 1."""
    tolerance = 0.01
    for p, q in ((0.0, 0.5), (0.003, 0.5), (0.2, 0.5), (0.498, 0.5), (0.5, 0.5), (0.9, 0.5), (1.0, 1.0)):
        kept, dropped = (TokenAcceptance(ALPHA, tolerance=tolerance) for _ in range(2))
        kept.add([True], [p], [q])
        dropped.add([False], [p], [q])
        claimed = float(probability(p, q))
        for true in np.clip([claimed - tolerance, claimed, claimed + tolerance], 0, 1):
            mean = true * np.exp(kept.mixture.log_e) + (1 - true) * np.exp(dropped.mixture.log_e)
            assert mean.max() <= 1 + 1e-9, (p, q, true)


@pytest.mark.parametrize("scale", [1.1, 0.9])
def test_a_scaled_ratio_is_found(scale: float) -> None:
    """Acceptance at 1.1 or .9 of p / q is found within 20 000 tested tokens, and its direction told."""
    generator = np.random.default_rng(22)
    p, q = drafted(generator, 20_000)
    coins = TokenAcceptance(5e-5)
    coins.add(generator.random(len(p)) < scale * p / q, p, q)
    result = coins.result()
    assert result.alarm
    assert ("more" if scale > 1 else "fewer") in result.words
    assert np.sign(coins.z) == np.sign(scale - 1)


def test_an_accept_test_with_a_slack_is_found() -> None:
    """A slack of .05 is found within 5000 tokens, and named."""
    generator = np.random.default_rng(23)
    p, q = drafted(generator, 5000)
    coins = TokenAcceptance(5e-5)
    coins.add(generator.random(len(p)) < p / q + 0.05, p, q)
    assert coins.result().alarm
    assert coins.mixture.best == "slack + 0.05"


def test_point_mass_drafts_and_exact_match_use_p() -> None:
    """With q = 1 the chance is p: coins at p pass, and accepting every second mistake is found."""
    generator = np.random.default_rng(24)
    p = generator.uniform(0.1, 0.9, 2000)
    right, wrong = TokenAcceptance(5e-5), TokenAcceptance(5e-5)
    right.add(generator.random(2000) < p, p, np.ones(2000))
    wrong.add(generator.random(2000) < (1 + p) / 2, p, np.ones(2000))
    assert not right.result().alarm
    assert wrong.result().alarm


def test_siblings_of_a_tree_are_tested_against_their_current_law() -> None:
    """Drawing without replacement passes with p' and q' updated; against the first p and q it does not."""
    generator = np.random.default_rng(25)
    current, stale = TokenAcceptance(5e-5), TokenAcceptance(5e-5)
    for _ in range(1500):
        p, q = generator.dirichlet(np.ones(6)), generator.dirichlet(np.ones(6))
        first_p, first_q = p, q
        for _ in range(2):
            token = int(generator.choice(6, p=q))
            kept = bool(generator.random() < min(1.0, p[token] / q[token]))
            current.add([kept], [p[token]], [q[token]])
            stale.add([kept], [first_p[token]], [first_q[token]])
            if kept:
                break
            p = np.maximum(p - q, 0)
            p = p / p.sum()
            q = np.where(np.arange(6) == token, 0, q)
            q = q / q.sum()
    assert not current.result().alarm
    assert stale.result().alarm


def test_a_few_rejections_of_certain_tokens_are_forgiven() -> None:
    """Where p = q, one rejection in 50 000 tokens is within float32's rounding; one in a hundred is not."""
    ones = np.full(50_000, 0.4)
    for rejections, alarm in ((1, False), (500, True)):
        coins = TokenAcceptance(5e-5)
        outcome = np.ones(len(ones), dtype=bool)
        outcome[:: len(ones) // rejections] = False
        coins.add(outcome, ones, ones)
        assert coins.result().alarm is alarm


# Block verification


def verify_blocks(
    generator: np.random.Generator, rounds: int, k: int, *, vocab: int = 5, scale: float = 1.0
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Run algorithm 2 of arXiv 2403.10444 on laws without memory; return lengths, p and q at the tokens."""
    p = generator.dirichlet(np.full(vocab, 1.0), (rounds, k + 1))
    q = generator.dirichlet(np.full(vocab, 1.0), (rounds, k))
    q = 0.5 * q + 0.5 * p[:, :k]
    tokens = (generator.random((rounds, k, 1)) > q.cumsum(2)).sum(2).clip(max=vocab - 1)
    at_p = np.take_along_axis(p[:, :k], tokens[..., None], 2)[..., 0]
    at_q = np.take_along_axis(q, tokens[..., None], 2)[..., 0]
    lengths, rho = np.zeros(rounds), np.ones(rounds)
    for i in range(k):
        rho = np.minimum(1.0, scale * rho * at_p[:, i] / at_q[:, i])
        keep = rho
        if i + 1 < k:
            over = np.maximum(rho[:, None] * p[:, i + 1] - q[:, i + 1], 0).sum(1)
            keep = np.divide(over, over + 1 - rho, out=np.ones(rounds), where=over + 1 - rho > 0)
        lengths = np.where(generator.random(rounds) <= keep, i + 1.0, lengths)
    return lengths, at_p, at_q


def test_block_verification_accepts_what_is_expected() -> None:
    """The mean accepted length is that of the sum of rho, and correct runs rarely alarm."""
    generator = np.random.default_rng(26)
    runs, alarms, z = 400, 0, []
    for _ in range(runs):
        lengths, p, q = verify_blocks(generator, 200, 4)
        blocks = BlockAcceptance(ALPHA, longest=4, tolerance=0.0)
        offered = np.full(200, 4)
        blocks.add(lengths, block_expectation(p, q, offered), offered)
        alarms += blocks.result().alarm
        z.append(blocks.z)
    assert alarms <= allowed(runs)
    assert abs(np.mean(z)) < 3 / math.sqrt(runs)
    assert np.std(z) == pytest.approx(1.0, abs=0.12)


def test_counting_the_bonus_as_accepted_is_found() -> None:
    """Counting the token after the accepted run as accepted alarms."""
    generator = np.random.default_rng(27)
    lengths, p, q = verify_blocks(generator, 2000, 4)
    offered = np.full(2000, 4)
    lengths = np.minimum(lengths + 1, 4)
    blocks = BlockAcceptance(5e-5, longest=4)
    blocks.add(lengths, block_expectation(p, q, offered), offered)
    assert blocks.result().alarm
    assert "more accepted" in blocks.result().words


def test_block_verification_with_a_scaled_ratio_is_found() -> None:
    """Ratios that are 1.1 times too high in the rule alarm within 20 000 rounds."""
    generator = np.random.default_rng(28)
    lengths, p, q = verify_blocks(generator, 20_000, 4, scale=1.1)
    offered = np.full(20_000, 4)
    blocks = BlockAcceptance(5e-5, longest=4)
    blocks.add(lengths, block_expectation(p, q, offered), offered)
    assert blocks.result().alarm


def test_rounds_may_offer_less_than_the_widest() -> None:
    """Only offered places count in the expectation."""
    p, q = np.full((2, 3), 0.25), np.full((2, 3), 0.5)
    assert block_expectation(p, q, [3, 1]) == pytest.approx([0.5 + 0.25 + 0.125, 0.5])


# Refusals


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [([1.5], [0.5], "p holds"), ([0.5], [math.nan], "q holds"), ([0.5, 0.5], [0.5], "shape")],
)
def test_what_is_no_probability_is_refused(p: list[float], q: list[float], message: str) -> None:
    """Arrays must hold probabilities, and match."""
    with pytest.raises(ValueError, match=message):
        TokenAcceptance(ALPHA).add([True] * len(p), p, q)


def test_a_round_cannot_accept_more_than_it_offered() -> None:
    """A length above what was drafted contradicts itself."""
    with pytest.raises(ValueError, match="more than it offered"):
        BlockAcceptance(ALPHA, longest=4).add([4], [1.0], [2])


def test_a_token_of_probability_0_in_q_is_kept_if_the_target_can_say_it() -> None:
    """As the rule does: u q < p."""
    assert probability([0.3, 0.0], [0.0, 0.0]).tolist() == [1.0, 0.0]
