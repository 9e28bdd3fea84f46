"""What lower precision judges by: allowances, mean margins, what they could have found, two arms' texts."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
import torch

from specbench.audit import margin_power, two_arms
from specbench.audit.alternatives import Alternatives, Scores
from specbench.audit.betting import FloatArray
from specbench.audit.e_process import MarginProcess
from specbench.audit.paired import CALIBRATION_PAIRS, Paired

ALPHA = 0.01
VOCAB = 12


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(two_arms).failed == 0
    assert doctest.testmod(margin_power).failed == 0


# Allowances of pairs


def alarms_of(shift: float, allowed: float, runs: int = 200, pairs: int = 300) -> float:
    """Return the share of runs that alarm when all differences are shifted."""
    generator = np.random.default_rng(5)
    found = 0
    for _ in range(runs):
        test = Paired(ALPHA, ["a", "b"])
        test.add(generator.normal(shift, 1.0, (pairs, 2)), tokens=0, allowed=allowed)
        found += test.result().alarm
    return found / runs


def test_a_shift_within_the_allowance_rarely_alarms() -> None:
    """Either way; without the allowance the same shift alarms, and twice of it does with it."""
    limit = ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / 200)
    assert alarms_of(0.5, 0.5) <= limit
    assert alarms_of(-0.5, 0.5) <= limit
    assert alarms_of(0.5, 0.0) > 0.9
    assert alarms_of(1.0, 0.5) > 0.9
    assert alarms_of(-1.0, 0.5) > 0.9


def test_a_negative_allowance_is_refused() -> None:
    """It would make a correct engine alarm."""
    with pytest.raises(ValueError, match="allowance is negative"):
        Paired(ALPHA, ["a"]).add([[0.1]], tokens=1, allowed=-0.1)


# Margins


def witnesses(generator: np.random.Generator, mass: FloatArray, shift: FloatArray) -> Scores:
    """Return scores of tokens whose set has probability `mass` under the reference, `shift` more in truth."""
    hits = generator.random(len(mass)) < mass + shift
    witness = (hits - mass)[:, None]
    return Scores(np.zeros((len(mass), 0)), witness, np.ones(len(mass), dtype=bool))


def test_a_mean_margin_spares_shifts_that_are_unequal() -> None:
    """Every other token is off by twice the margin, and the others not at all: their mean is within."""
    generator, margin, runs, alarms = np.random.default_rng(7), 0.05, 300, 0
    for _ in range(runs):
        mass = generator.uniform(0.1, 0.6, 2000)
        shift = np.where(np.arange(2000) % 2 == 0, 0.0, 2 * margin)
        test = MarginProcess(margin=margin, alpha=ALPHA)
        test.update(witnesses(generator, mass, shift))
        alarms += test.is_rejected
    assert alarms / runs <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / runs)


def test_what_one_arm_could_have_found_is_found() -> None:
    """A fault of the smallest detectable size alarms nearly always; one of a third of it rarely."""
    generator, margin, num = np.random.default_rng(8), 0.01, 4000
    mass = generator.uniform(0.05, 0.7, num)
    seen = witnesses(generator, mass, np.zeros(num)).witness
    smallest = margin_power.by_one_arm(seen, margin=margin, alpha=ALPHA)[0]
    assert smallest is not None
    assert margin < smallest < 0.2
    found = {1.0: 0, 1 / 3: 0}
    for part in found:
        for _ in range(100):
            share = part * smallest / (1 - mass).mean()
            test = MarginProcess(margin=margin, alpha=ALPHA)
            test.update(witnesses(generator, mass, share * (1 - mass)))
            found[part] += test.is_rejected
    assert found[1.0] >= 96
    assert found[1 / 3] <= 30


def test_what_pairs_could_have_found_is_found() -> None:
    """The same of the paired test, per request of 20 tokens."""
    generator, allowed, pairs, length = np.random.default_rng(9), 0.2, 300, 20

    def drawn(share: float) -> tuple[FloatArray, FloatArray]:
        mass = generator.uniform(0.05, 0.7, pairs * length)
        on = witnesses(generator, mass, share * (1 - mass)).witness.reshape(pairs, length).sum(1)
        off = witnesses(generator, mass, 0 * mass).witness.reshape(pairs, length).sum(1)
        return (on - off)[:, None], (1 - mass).reshape(pairs, length).sum(1)[:, None]

    differences, room = drawn(0.0)
    test = Paired(ALPHA, ["a"])
    test.add(differences, tokens=0, allowed=allowed)
    assert test.scale is not None
    bet_on = differences[CALIBRATION_PAIRS:], room[CALIBRATION_PAIRS:]
    tokens = len(bet_on[0]) * length
    smallest = margin_power.by_pairs(
        *bet_on, tokens, scale=test.scale, allowed=allowed, alpha=test.mixture.alpha
    )[0]
    assert smallest is not None
    found = 0
    for _ in range(100):
        test = Paired(ALPHA, ["a"])
        test.add(drawn(smallest / 0.625)[0], tokens=0, allowed=allowed)
        found += test.result().alarm
    assert found >= 95


def test_nothing_is_found_in_a_handful_of_tokens() -> None:
    """None, not a number, where even the largest fault would pass."""
    assert margin_power.by_one_arm([[0.5], [-0.5]], margin=0.01, alpha=ALPHA) == [None]


def test_shifts_are_expected_witnesses() -> None:
    """By how much a law exceeds p on a direction's set is what its tokens' witnesses are on average."""
    generator = torch.Generator().manual_seed(3)
    p, q, other = torch.rand(3, 6, VOCAB, generator=generator, dtype=torch.float64).softmax(-1)
    for has_draft in (True, False):
        alternatives = Alternatives(has_draft)
        draft = q if has_draft else None
        shifts = alternatives.shifts(p, draft, [other, p])
        table = alternatives.table(p, draft).witness.reshape(6, VOCAB, -1)
        expected = np.einsum("tv,tvd->td", other.numpy(), table)
        np.testing.assert_allclose(shifts[:, 0], expected, atol=1e-12)
        np.testing.assert_allclose(shifts[:, 1], 0, atol=1e-12)


# Texts of two arms


def texts(generator: np.random.Generator, num: int, lean: float = 0.0) -> list[tuple[int, ...]]:
    """Return texts of up to 4 tokens: 0 ends one, and a fault makes the second token likelier to be 1."""
    drawn = []
    for _ in range(num):
        text: list[int] = []
        while len(text) < 4 and (not text or text[-1]):
            law = np.array([0.1, 0.4, 0.3, 0.2])
            if len(text) == 1:
                law = law + lean * np.array([0, 1, -0.5, -0.5])
            text.append(int(generator.choice(4, p=law)))
        drawn.append(tuple(text))
    return drawn


def test_cells_hold_everything_and_depend_on_nothing_else() -> None:
    """Common texts are cells, rare ones join their prefix, and unseen ones have a place."""
    cell = two_arms.cells([(1, 1)] * 100 + [(1, 2)] * 100 + [(2, 1)] * 60 + [(2, 2)] * 3 + [(3, 0)] * 100)
    assert len({cell((1, 1)), cell((1, 2)), cell((2, 1)), cell((3, 0))}) == 4
    known = {cell(text) for text in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 0))}
    assert cell((2, 7)) in known
    assert cell((9, 9)) in known
    assert isinstance(two_arms.cells([(1, 2), (1, 2, 3)])((1,)), int)


def test_the_lower_bound_is_below_the_truth() -> None:
    """For equal arms below 0, for unlike ones below their distance and far above 0."""
    generator = np.random.default_rng(11)
    runs = 30
    equal = [
        two_arms.lower_bound([(texts(generator, 300), texts(generator, 300))] * 2, ALPHA) for _ in range(runs)
    ]
    assert max(equal) <= 0
    unlike = two_arms.lower_bound([(texts(generator, 3000, 0.4), texts(generator, 3000))], ALPHA)
    assert 0.2 < unlike < 0.9 * 0.4


def test_a_difference_that_rounding_explains_is_no_fault() -> None:
    """The same arms alarm above a small floor and not above a large one, p being tiny in both."""
    generator = np.random.default_rng(12)
    arms = [(texts(generator, 2000, 0.4), texts(generator, 2000))]
    found = {floor: two_arms.judge(arms, floor=floor, alpha=1e-3, seed=1) for floor in (0.05, 0.5)}
    assert found[0.05].component(1).alarm
    assert not found[0.5].component(1).alarm
    assert found[0.5].result.p_value is not None
    assert found[0.5].result.p_value <= 1e-3
    assert "explained by rounding" in found[0.5].component(1).words


def test_draws_are_planned_by_distance_and_level() -> None:
    """Half the distance takes four times the draws."""
    few, many = (two_arms.draws_per_prompt(tv, 1e-4, 3) for tv in (0.1, 0.05))
    assert 3.9 < many / few < 4.1
