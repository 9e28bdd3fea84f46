"""Proposals: drafts that say what they do rarely alarm, those that do not are found and told apart."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest

from specbench.audit import proposals
from specbench.audit.betting import FloatArray
from specbench.audit.proposals import Proposals

ALPHA = 0.05
VOCAB = 64


def laws(generator: np.random.Generator, num: int, spread: float = 2.0, vocab: int = VOCAB) -> FloatArray:
    """Return draft laws as of a small language model [num, vocab]."""
    rows = np.exp(generator.normal(0, spread, (num, vocab)))
    return np.asarray(rows / rows.sum(1, keepdims=True))


def powered(q: FloatArray, power: float) -> FloatArray:
    rows = q**power
    return np.asarray(rows / rows.sum(1, keepdims=True))


def sample(generator: np.random.Generator, law: FloatArray) -> FloatArray:
    draws = (generator.random((len(law), 1)) > law.cumsum(1)).sum(1)
    return np.asarray(draws.clip(max=law.shape[1] - 1))


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(proposals).failed == 0


def test_true_claims_rarely_alarm() -> None:
    """Tokens drawn from their claimed q, also beside another law, alarm in at most alpha of the runs."""
    generator = np.random.default_rng(31)
    runs, alarms = 400, 0
    for _ in range(runs):
        q = laws(generator, 200, vocab=12)
        draft = Proposals(ALPHA, others=["raw"])
        draft.add(q, sample(generator, q), {"raw": powered(q, 0.7)})
        alarms += draft.result().alarm
    assert alarms <= runs * ALPHA + 3 * math.sqrt(runs * ALPHA * (1 - ALPHA))


def test_every_alternative_is_a_law() -> None:
    """The expected factor of each bet under q is 1, computed exactly, for rows with and without zeros."""
    generator = np.random.default_rng(32)
    q = laws(generator, 1, vocab=8)
    q[0, 3] = 0.0
    q /= q.sum()
    total = np.zeros(12)
    for token in np.flatnonzero(q[0]):
        draft = Proposals(ALPHA, others=["raw"])
        draft.add(q, [token], {"raw": powered(q, 0.5)})
        total += q[0, token] * np.exp(draft.mixture.log_e)
    assert total == pytest.approx(np.ones(12))


def test_a_draft_at_095_claimed_as_1_is_found() -> None:
    """Sampled at T .95 and claimed as T 1: the median run alarms at 5e-5 within some 12 000 tokens."""
    generator = np.random.default_rng(33)
    needed = []
    for _ in range(7):
        draft = Proposals(5e-5)
        while not draft.mixture.alarm and draft.tokens < 40_000:
            q = laws(generator, 1000)
            draft.add(q, sample(generator, powered(q, 1 / 0.95)))
        needed.append(draft.mixture.alarm_at or 40_000)
        assert draft.mixture.best in ("q^1.05", "q^1.1")
    assert np.median(needed) < 15_000


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("greedy", {"0.9 argmax", "q^2"}),
        ("temperature .8", {"q^1.25", "q^1.1"}),
        ("truncated", {"top 0.95 of q", "q^1.1", "q^1.25"}),
        ("raw", {"raw"}),
    ],
)
def test_false_claims_are_found_and_named(fault: str, names: set[str]) -> None:
    """Greedy, sharper, truncated and unprocessed drafts alarm within 6000 tokens, each under its own name."""
    generator = np.random.default_rng(34)
    q = laws(generator, 6000)
    raw = np.roll(powered(q, 0.9), 1, axis=1) * 0.2 + 0.8 * q
    if fault == "greedy":
        tokens = q.argmax(1)
    elif fault == "truncated":
        ordered = np.sort(q, axis=1)
        tenth = ordered[:, -10:-9]
        tokens = sample(generator, np.where(q >= tenth, q, 0) / np.where(q >= tenth, q, 0).sum(1)[:, None])
    else:
        tokens = sample(generator, powered(q, 1.25) if fault == "temperature .8" else raw)
    draft = Proposals(5e-5, others=["raw"])
    draft.add(q, tokens, {"raw": raw})
    assert draft.result().alarm
    assert draft.mixture.best in names


def test_a_token_that_q_excludes_alarms_by_itself() -> None:
    """One draft token of claimed probability 0 is enough, whatever else was drafted."""
    draft = Proposals(5e-5)
    draft.add([[0.5, 0.5, 0.0]] * 3, [0, 2, 1])
    result = draft.result()
    assert (result.alarm, result.kind, result.evidence, result.tokens) == (True, "exact", 1.0, 3)


def test_point_mass_drafts_pass() -> None:
    """An n-gram drafter's q is 1 at its token: nothing to gain against it."""
    q = np.eye(5)[[0, 3, 2] * 100]
    draft = Proposals(5e-5)
    draft.add(q, q.argmax(1))
    assert draft.mixture.peak <= 1e-9
    assert not draft.result().alarm


def test_chunks_change_nothing() -> None:
    """The evidence is the same however the tokens are cut into chunks."""
    generator = np.random.default_rng(35)
    q = laws(generator, 90)
    tokens = sample(generator, q)
    whole, cut = Proposals(5e-5), Proposals(5e-5)
    whole.add(q, tokens)
    for place in range(0, 90, 7):
        cut.add(q[place : place + 7], tokens[place : place + 7])
    assert whole.mixture.log_e == pytest.approx(cut.mixture.log_e)
    assert whole.mixture.peak == pytest.approx(cut.mixture.peak)


def test_what_does_not_fit_is_refused() -> None:
    """Laws that are none, tokens without rows, and unannounced alternatives are mistakes of the caller."""
    draft = Proposals(5e-5)
    with pytest.raises(ValueError, match="no distribution"):
        draft.add([[0.0, 0.0]], [0])
    with pytest.raises(ValueError, match="rows"):
        draft.add([[0.5, 0.5]], [0, 1])
    with pytest.raises(ValueError, match="expected"):
        draft.add([[0.5, 0.5]], [0], {"raw": [[0.5, 0.5]]})
