"""What earlier completions said: a fair bet under the null, and one that learns any deviation."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from specbench.audit import recollection
from specbench.audit.recollection import DEPTH, Recollection

P = np.array([0.5, 0.3, 0.15, 0.05])
ALPHA = 0.05


def stream(law: np.ndarray, completions: int, seed: int, *, length: int = 2) -> Recollection:
    """Return the test after completions of one prompt, each token drawn alike."""
    generator = np.random.default_rng(seed)
    memory = Recollection(ALPHA)
    for _ in range(completions):
        tokens = generator.choice(len(law), size=length, p=law).tolist()
        memory.add("prompt", tokens, P[tokens].tolist())
    return memory


def test_factor_has_mean_one() -> None:
    """Whatever came before, the next factor of every bet has expectation 1 under the target's law."""
    mean = np.zeros(len(recollection.WEIGHTS))
    for token, probability in enumerate(P):
        memory = stream(P, 25, seed=3, length=1)
        before = memory.mixture.log_e.copy()
        memory.add("prompt", [token], [probability])
        mean += probability * np.exp(memory.mixture.log_e - before)
    assert mean == pytest.approx(1.0)


def test_alarms_stay_within_alpha() -> None:
    """Completions of the target alarm in at most one stream of twenty."""
    alarms = sum(stream(P, 150, seed).mixture.alarm for seed in range(200))
    assert alarms <= 18  # binomial(200, .05) exceeds it once in a hundred times, and this is a bound


def test_a_deviation_is_learned() -> None:
    """A deviation of TV .15 that no family describes is found, and words say what it is."""
    wrong = P + np.array([-0.15, 0.05, 0.0, 0.1])
    streams = [stream(wrong, 400, seed) for seed in range(20)]
    assert all(memory.mixture.alarm for memory in streams)
    result = streams[0].result()
    assert result.alarm
    assert "come more often" in result.words


def test_prompts_do_not_mix() -> None:
    """What one prompt's completions say is no evidence about another's."""
    memory = Recollection(ALPHA)
    for number in range(200):
        memory.add(number, [0], [0.01])
    assert memory.mixture.peak == 0.0


def test_late_and_impossible_tokens_change_nothing() -> None:
    """Tokens beyond the depth, and those that the target cannot emit, leave the evidence alone."""
    memory = Recollection(ALPHA)
    for _ in range(50):
        memory.add("prompt", [1] * (DEPTH + 1), [1.0] * DEPTH + [0.01])
        memory.add("other", [2], [0.0])
    assert memory.mixture.log_e == pytest.approx(0.0)


def test_what_is_no_probability_is_refused() -> None:
    """A likelihood that is not between 0 and 1 is a programming error."""
    with pytest.raises(ValueError, match="probability is nan"):
        Recollection(ALPHA).add("prompt", [1], [float("nan")])


def test_docstring_example_runs() -> None:
    """The example in the docstring gives what it says."""
    assert doctest.testmod(recollection).failed == 0
