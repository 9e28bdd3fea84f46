"""The chi-squared check: its cells, its support test, its false alarms and its power, by simulated audits."""

from __future__ import annotations

import doctest
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench import stats
from specbench.audit import chi_squared
from specbench.audit.chi_squared import Continuation, ExpectedTable, judge, pool_by_prefix

EOS = 9


def random_law(generator: np.random.Generator, horizon: int = 4) -> ExpectedTable:
    """Return an uneven law over the continuations of three symbols, some of which end early."""
    joint: dict[Continuation, float] = {(): 1.0}
    for _ in range(horizon):
        grown: dict[Continuation, float] = {}
        for prefix, mass in joint.items():
            if prefix and prefix[-1] == EOS:
                grown[prefix] = mass
                continue
            for token, share in zip((0, 1, EOS), generator.dirichlet([3, 1, 0.5]), strict=True):
                grown[(*prefix, token)] = mass * share
        joint = grown
    return ExpectedTable(joint)


def draw(law: ExpectedTable, num: int, generator: np.random.Generator) -> list[Continuation]:
    """Draw continuations from a law."""
    keys, probabilities = list(law.continuations), list(law.continuations.values())
    return [keys[place] for place in generator.choice(len(keys), num, p=probabilities)]


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(chi_squared).failed == 0


# The law


def test_a_law_is_renormalised_and_loses_its_impossible_outcomes() -> None:
    """Probabilities sum to 1 and an outcome of probability 0 is outside the support."""
    law = ExpectedTable({(0,): 0.5 + 2e-10, (1,): 0.5, (2,): 0.0})
    assert math.fsum(law.continuations.values()) == pytest.approx(1.0, abs=1e-15)
    assert law.key_of((1,)) == (1,)
    assert law.key_of((2,)) is None


@pytest.mark.parametrize(
    ("continuations", "message"),
    [
        ({(0,): 0.5, (1,): 0.49}, "sum to"),
        ({(0,): 1.5, (1,): -0.5}, "negative"),
        ({(0,): math.nan, (1,): 1.0}, "undefined"),
        ({}, "sum to"),
        ({(0,): 0.5, (0, 1): 0.5}, "beginning of another"),
    ],
)
def test_what_is_no_law_is_refused(continuations: dict[Continuation, float], message: str) -> None:
    """A table must be a probability distribution over outcomes that exclude one another."""
    with pytest.raises(ValueError, match=message):
        ExpectedTable(continuations)


def test_a_truncated_prefix_takes_what_begins_with_it() -> None:
    """Below a truncated prefix every longer continuation belongs to it; the prefix alone is unfinished."""
    law = ExpectedTable({(0, 1): 0.75, (1,): 0.25}, truncated=frozenset({(1,)}))
    assert law.key_of((1, 5)) == (1,)
    assert law.key_of((1, 5, 7)) == (1,)
    assert law.key_of((1,)) is None
    assert law.key_of((0, 1)) == (0, 1)
    assert law.key_of((0, 1, 2)) is None
    assert law.key_of((0,)) is None


# The cells


def test_cells_hold_every_draw_and_the_rare_ones_together() -> None:
    """Rare continuations share a tail named None; expected and observed both sum to the draws."""
    law = ExpectedTable({(0,): 0.5, (1,): 0.3, (2,): 0.12, (3,): 0.04, (4,): 0.04})
    draws = [(0,)] * 80 + [(1,)] * 40 + [(2,)] * 10 + [(4,)] * 20
    result = judge([(law, draws)], alpha=0.01, generator=np.random.default_rng(0))
    cells = result.cells[0]
    assert [cell.continuation for cell in cells] == [(0,), (1,), (2,), None]
    assert [cell.expected for cell in cells] == pytest.approx([75, 45, 18, 12])
    assert [cell.observed for cell in cells] == [80, 40, 10, 20]
    assert result.df == 3
    assert result.tv_observed == pytest.approx((5 + 5 + 8 + 8) / 300)
    assert (result.draws, result.tested_draws, result.prompts) == (150, 150, 1)


def test_prompts_add_up() -> None:
    """Statistics and degrees of freedom are summed over prompts; a prompt without draws adds nothing."""
    generator = np.random.default_rng(1)
    pairs = [(law, draw(law, num, generator)) for num in (300, 0, 500) for law in [random_law(generator)]]
    together = judge(pairs, alpha=0.01, generator=generator)
    apart = [judge([pair], alpha=0.01, generator=generator) for pair in (pairs[0], pairs[2])]
    assert together.df == sum(result.df for result in apart)
    assert together.statistic == pytest.approx(sum(result.statistic or 0.0 for result in apart))
    assert (together.draws, together.prompts, together.cells[1]) == (800, 2, ())


# What cannot be tested


def test_a_deterministic_prompt_tests_only_the_support() -> None:
    """With one possible continuation there is no p-value; another one is still a failure."""
    law = ExpectedTable({(3, 3): 1.0})
    agrees = judge([(law, [(3, 3)] * 50)], alpha=0.01, generator=np.random.default_rng(0))
    assert (agrees.df, agrees.statistic, agrees.p_value, agrees.is_rejected) == (0, None, None, None)
    assert (agrees.tv_observed, agrees.tv_upper, agrees.smallest_detectable_tv) == (None, None, None)
    assert (agrees.draws, agrees.tested_draws) == (50, 0)
    strays = judge([(law, [(3, 3)] * 49 + [(3, 4)])], alpha=0.01, generator=np.random.default_rng(0))
    assert (strays.p_value, strays.is_rejected, strays.out_of_support) == (None, True, 1)


def test_too_few_draws_for_two_cells_test_nothing() -> None:
    """Draws that all pool into one cell, and no draws at all, are inconclusive rather than a pass."""
    law = random_law(np.random.default_rng(2))
    for draws in ([], draw(law, 12, np.random.default_rng(3))):
        result = judge([(law, draws)], alpha=0.01, generator=np.random.default_rng(0))
        assert (result.df, result.p_value, result.is_rejected) == (0, None, None)
    assert judge([], alpha=0.01, generator=np.random.default_rng(0)).is_rejected is None


# What must fail


def test_one_impossible_continuation_fails_whatever_the_p_value() -> None:
    """A single continuation the target cannot produce rejects, and is named with its prompt."""
    generator = np.random.default_rng(4)
    law = random_law(generator)
    draws = draw(law, 1000, generator)
    result = judge([(law, draws), (law, [*draws, (0, 0)])], alpha=1e-3, generator=generator)
    assert result.p_value is not None
    assert result.p_value > 0.001
    assert result.is_rejected
    assert result.impossible == ((1, (0, 0)),)
    assert sum(cell.observed for cell in result.cells[1]) == 1001


def test_a_repeated_token_is_seen_although_every_position_is_right() -> None:
    """Right at each position but the same coin twice: whole continuations show it."""
    law = ExpectedTable(dict.fromkeys(itertools.product((0, 1), repeat=2), 0.25))
    draws = [(0, 0)] * 100 + [(1, 1)] * 100
    assert judge([(law, draws)], alpha=1e-4, generator=np.random.default_rng(0)).is_rejected


# Error rates


def test_under_the_null_p_values_are_uniform() -> None:
    """Over 1,500 audits of a lossless decoder the share rejected at each level is the level."""
    generator = np.random.default_rng(6)
    laws = [random_law(generator) for _ in range(2)]
    p_values = []
    for _ in range(1500):
        audit = [(law, draw(law, 250, generator)) for law in laws]
        p_value = judge(audit, alpha=0.05, generator=generator).p_value
        assert p_value is not None
        p_values.append(p_value)
    for level in (0.05, 0.2, 0.5, 0.8):
        spread = 3.3 * math.sqrt(level * (1 - level) / 1500)
        # Up to 1/201 below the level, since the smallest step of p is 1/201.
        assert level - 0.005 - spread <= np.mean(np.array(p_values) <= level) <= level + spread


def test_the_smallest_detectable_distance_is_found() -> None:
    """At the printed distance, in the direction hardest to find, .97 or more of the audits reject."""
    generator = np.random.default_rng(8)
    alpha, draws = 1e-2, 1500
    shares = np.repeat([0.2, 0.12, 0.08, 0.06, 0.04], 2)
    law = ExpectedTable({(token,): share for token, share in enumerate(shares.tolist())})
    distance = stats.smallest_detectable_tv(2 * draws, 18, alpha)
    assert distance is not None
    tilt = np.where(np.arange(10) % 2, 1 - 2 * distance, 1 + 2 * distance)
    faulty = ExpectedTable({(token,): share for token, share in enumerate((shares * tilt).tolist())})
    found = 0
    for _ in range(300):
        audit = [(law, draw(faulty, draws, generator)) for _ in range(2)]
        result = judge(audit, alpha=alpha, generator=generator)
        assert result.smallest_detectable_tv == distance
        found += result.is_rejected is True
    assert found / 300 >= 0.97


def test_rare_continuations_are_joined_where_they_share_a_prefix() -> None:
    """What is rare at the end keeps apart what can be told apart early."""
    law = ExpectedTable({(0, a, b): 0.5 / 16 for a in range(4) for b in range(4)} | {(1, 0, 0): 0.5})
    pooling = pool_by_prefix(law, 100, 10.0)
    assert pooling.names == ((1, 0, 0), (0, 0), (0, 1), (0, 2), (0, 3))
    assert pooling.labels[0, 2, 3] == pooling.labels[0, 2, 0] == 3
    coarser = pool_by_prefix(law, 100, 20.0)
    assert coarser.names == ((0,), (1, 0, 0))


def test_what_is_left_over_joins_the_smallest_cell() -> None:
    """A tail too small for a cell of its own does not stay one."""
    law = ExpectedTable({(0,): 0.6, (1,): 0.35, (2,): 0.03, (3,): 0.02})
    assert pool_by_prefix(law, 100, 10.0).labels == {(0,): 0, (1,): 1, (2,): 1, (3,): 1}
    assert pool_by_prefix(law, 300, 10.0).names == ((0,), (1,), None)
    assert pool_by_prefix(law, 5, 10.0).names == (None,)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), minimum=st.sampled_from([1.0, 5.0, 20.0]))
def test_every_cell_expects_enough(seed: int, minimum: float) -> None:
    """Every continuation has one cell, and every cell its minimum unless there is only one."""
    random = np.random.default_rng(seed)
    keys = {tuple(random.integers(0, 3, 4).tolist()) for _ in range(20)}
    weights = random.dirichlet(np.full(len(keys), 0.3))
    law = ExpectedTable(dict(zip(sorted(keys), weights.tolist(), strict=True)))
    pooling = pool_by_prefix(law, 100, minimum)
    assert set(pooling.labels) == set(law.continuations)
    held = np.zeros(len(pooling.names))
    for key, label in pooling.labels.items():
        held[label] += 100 * law.continuations[key]
    assert (held >= minimum - 1e-9).all() or len(held) == 1
    assert (np.diff(held[:-1]) <= 1e-9).all()
