"""The probe of parameters: silent on right samplers, loud and by name on each mistake.

Samples come from the reference's own laws of a tiny model, so nothing but the mistake is tested. Seeds and
numbers were fixed beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, copied, shared

from specbench.audit.parameter_probe import TOKENS, ParameterProbe, Setting, settings
from specbench.audit.reference import Oracle
from specbench.records import SamplingParams

ALPHA = 5e-5
PROMPTS = ((3, 1, 4, 1, 5, 9), (2, 7, 1), (7, 7, 8, 9, 7, 7, 8, 9))
TEXTS = ((3, 1, 4, 1, 5, 9, 2, 6, 5, 3), (1, 5, 9, 2), (4, 1, 5, 5, 9))
LENGTH = 16
CHOSEN = settings(SamplingParams(), TEXTS, vocab=VOCAB)


@cache
def model() -> Any:
    return copied(shared("llama"), "sdpa")


def drawn(sampling: SamplingParams, num: int, seed: int) -> list[tuple[tuple[int, ...], list[int]]]:
    """Sample outputs token by token from the reference under some parameters; all prompts in turn."""
    oracle = Oracle(model(), sampling)
    generator = torch.Generator().manual_seed(seed)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(num)]
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(LENGTH):
        texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
        laws = oracle.next_distributions(texts, [len(prompt) for prompt in prompts])
        for output, token in zip(
            outputs, torch.multinomial(laws, 1, generator=generator)[:, 0].tolist(), strict=True
        ):
            output.append(token)
    return list(zip(prompts, outputs, strict=True))


def probe(really: Mapping[str, SamplingParams], seed: int, tokens: int = TOKENS) -> ParameterProbe:
    """Judge outputs under the settings that are named, each sampled with what is beside its name."""
    found = ParameterProbe(ALPHA, CHOSEN)
    for setting in (each for each in CHOSEN if each.name in really):
        oracle = Oracle(model(), setting.sampling)
        for prompt, output in drawn(really[setting.name], tokens // LENGTH, seed):
            ((_, logits),) = oracle.rows(prompt, [output])
            found.add(found.weigh(setting, prompt, output, logits, oracle))
    return found


def setting(name: str) -> Setting:
    return next(setting for setting in CHOSEN if setting.name == name)


def test_the_settings_use_every_parameter() -> None:
    """None of what shapes a distribution is left out, and each has its mistakes."""
    mistakes = {
        mistake.split()[1] for each in CHOSEN for mistake in each.mistakes if mistake.startswith("without")
    }
    shapes = {"temperature", "top_k", "top_p", "min_p", "logit_bias", "bad_words"}
    assert mistakes >= shapes | {"repetition_penalty", "presence_penalty", "frequency_penalty"}


def test_what_was_asked_for_is_drawn_too() -> None:
    """Parameters of the audit itself come first; without any there are the usual four settings."""
    asked = settings(SamplingParams(top_k=5), TEXTS, vocab=VOCAB)
    assert asked[0].name == "what was asked for"
    assert len(asked) == len(CHOSEN) + 1 == 5


@pytest.mark.parametrize("seed", range(2))
def test_right_sampling_raises_no_alarm(seed: int) -> None:
    """At two seeds, neither the mistakes nor the support."""
    assert not probe({each.name: each.sampling for each in CHOSEN}, seed, tokens=256).alarm


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("a cut", "without temperature"),
        ("a cut", "top_p twice"),
        ("a cut", "without top_k"),
        ("a floor", "without min_p"),
        ("a floor", "temperature after the cuts"),
        ("penalties", "without repetition_penalty"),
        ("penalties", "without any penalty"),
        ("tokens", "without logit_bias"),
        ("tokens", "without bad_words"),
    ],
)
def test_a_mistake_is_noticed(name: str, mistake: str) -> None:
    """Outputs sampled with a mistake alarm, in the law or in the support."""
    found = probe({name: setting(name).mistakes[mistake]}, 7)
    assert found.alarm
    assert any(result.alarm for result in found.results())


def test_a_mistake_of_shares_is_named() -> None:
    """What fits best is the mistake that was made."""
    found = probe({"a floor": setting("a floor").mistakes["temperature after the cuts"]}, 7)
    assert "temperature after the cuts" in found.mixture.best
    assert "temperature after the cuts" in next(found.results()).words


def test_factors_have_expectation_one() -> None:
    """Under the target's law no alternative is expected to grow: the sum of p times each factor is 1."""
    each = setting("a cut")
    oracle = Oracle(model(), each.sampling)
    ((_, logits),) = oracle.rows(PROMPTS[0], [TEXTS[0][:1]])
    p = oracle.law(logits, PROMPTS[0], TEXTS[0][:1])[0]
    total = torch.zeros(len(ParameterProbe(ALPHA, [each]).mixture.names), dtype=torch.float64)
    for token in p.nonzero()[:, 0].tolist():
        one = ParameterProbe(ALPHA, [each])
        one.add(one.weigh(each, PROMPTS[0], [token], logits, oracle))
        total += p[token] * torch.as_tensor(one.mixture.log_e).exp()
    assert torch.allclose(total, torch.ones_like(total), atol=1e-9)
