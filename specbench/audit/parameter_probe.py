"""Are the sampling parameters applied where drafts are verified, also those that the audit was not asked for?

An audit at temperature 1 exercises no parameter: one that is left out of the verification, or applied twice,
changes nothing there. So a few hundred tokens are drawn under settings that use all of them, and are scored
against the laws of the likely mistakes. Each mistake has a law of its own, so little is needed to tell it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.audit.betting import FloatArray, Mixture
from specbench.audit.reference import Oracle
from specbench.audit.support import IntArray, Margin, zones_of_emitted
from specbench.audit.verdicts import ComponentResult
from specbench.records import GENERATE_ORDER, SamplingParams

TOKENS = 512
"""Scored tokens per setting. A mistake that moves 5 % of the mass, TV, takes some 400."""
SHARES = (0.15, 0.5, 1.0)
"""Of the tokens that a mistake concerns: it may spare bonus rows, or have only those."""
KEPT = 0.01
"""Share of p in every alternative, so that none dies on one token."""

OFF: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
    "bad_words": (),
}
"""What each parameter is where it is not used."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Parameters to draw under, and by name what the target would be sampled with by mistake."""

    name: str
    sampling: SamplingParams
    mistakes: Mapping[str, SamplingParams]


def settings(asked: SamplingParams, texts: Sequence[Sequence[int]], *, vocab: int) -> tuple[Setting, ...]:
    """Return what to draw under: what was asked for, if it has parameters, and four settings that use all.

    Args:
        asked: The audited sampling.
        texts: Outputs that were seen before; their common tokens are biased and forbidden.
        vocab: Size of the vocabulary.
    """
    plain = replace(SamplingParams(), ignore_eos=asked.ignore_eos, stop_token_ids=asked.stop_token_ids)
    counts = Counter(token for text in texts for token in text)
    common = [token for token, _ in counts.most_common(7)] or list(range(min(7, vocab)))
    pairs = Counter(pair for text in texts for pair in pairwise(text))
    words = tuple(pair for pair, _ in pairs.most_common(4) if not set(pair) <= {common[0]})
    bias = tuple((token, value) for token, value in zip(common[1:], (1.5, -1.5, 2.0, -2.0), strict=False))
    chosen = {
        "a cut": replace(plain, temperature=0.7, top_k=4, top_p=0.85),
        "a floor": replace(plain, temperature=1.4, min_p=0.1),
        "penalties": replace(
            plain, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.8, temperature=0.8
        ),
        "tokens": replace(plain, logit_bias=bias, bad_words=((common[0],), *words), temperature=0.8),
    }
    if _used(asked):
        shape = {name: getattr(asked, name) for name in OFF}
        chosen = {"what was asked for": replace(plain, **shape, order=asked.order), **chosen}
    return tuple(Setting(name, sampling, _mistakes(sampling)) for name, sampling in chosen.items())


def _used(sampling: SamplingParams) -> list[str]:
    return [name for name, off in OFF.items() if getattr(sampling, name) != off]


def _mistakes(sampling: SamplingParams) -> dict[str, SamplingParams]:
    """Return each parameter left out, each applied twice, and the cuts in the other order."""
    used = _used(sampling)
    found = {f"without {name}": replace(sampling, **{name: OFF[name]}) for name in used}
    twice: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": sampling.temperature**2},
        "repetition_penalty": {"repetition_penalty": sampling.repetition_penalty**2},
        "presence_penalty": {"presence_penalty": 2 * sampling.presence_penalty},
        "frequency_penalty": {"frequency_penalty": 2 * sampling.frequency_penalty},
        "logit_bias": {"logit_bias": tuple((token, 2 * bias) for token, bias in sampling.logit_bias)},
        "min_p": {"min_p": sampling.min_p**2},
    }
    found |= {f"{name} twice": replace(sampling, **twice[name]) for name in used if name in twice}
    if sampling.top_p < 1:
        found["top_p twice"] = replace(sampling, top_p=sampling.top_p**2)
    others = [name for name in ("top_k", "top_p", "min_p") if name in used]
    if "temperature" in used and others:
        late = tuple(name for name in sampling.order if name != "temperature")
        found["temperature after the cuts"] = replace(sampling, order=(*late, "temperature"))
    if {"top_k", "top_p"} <= set(used):
        swapped = {"top_k": "top_p", "top_p": "top_k"}
        order = tuple(swapped.get(name, name) for name in sampling.order or GENERATE_ORDER)
        found["top_p before top_k"] = replace(sampling, order=order)
    penalties = [name for name in used if name.endswith("_penalty")]
    if penalties:
        found["without any penalty"] = replace(sampling, **{name: OFF[name] for name in penalties})
    return found


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one output says: log factors of the bets `[T, bets]`, and where in the support it lies `[T]`."""

    log_factors: FloatArray
    zones: IntArray


class ParameterProbe:
    """An e-process that grows when tokens follow the law of a mistake rather than the target's.

    Null hypothesis: given the text before it, every token drawn under a setting follows the target's
    processed distribution. The alternatives of a setting are (1 - s) p + s a, where a is the law of the same
    logits with a parameter left out or counted twice, on the support of p, and s one of `SHARES`. Tokens
    outside the support by more than a margin are counted by `Margin`.

    Invalid where p is not the target's: lower precision, another model. No alarm says that these mistakes,
    at these strengths, gained nothing; a parameter that was not tried may be wrong.

    References:
        Ramdas et al., "Game-theoretic statistics and safe anytime-valid inference" (2023).

    Args:
        alpha: Its share of the error budget, half of it for the support.
        settings: What is drawn under.
    """

    def __init__(self, alpha: float, settings: Sequence[Setting]) -> None:
        self.bets = [
            (setting.name, mistake, share)
            for setting in settings
            for mistake in setting.mistakes
            for share in SHARES
        ]
        names = [f"{mistake} (under {name}, {share:g} of it)" for name, mistake, share in self.bets]
        self.mixture = Mixture(names, alpha / 2)
        self.margin = Margin(alpha / 2)

    @property
    def alarm(self) -> bool:
        """Return whether more tokens would change nothing."""
        return self.mixture.alarm or self.margin.mixture.alarm

    def add(self, evidence: Evidence) -> None:
        """Take in what one output says, in the order of submission."""
        self.mixture.multiply(evidence.log_factors)
        self.margin.add(evidence.zones)

    def weigh(
        self, setting: Setting, prompt: Sequence[int], output: Sequence[int], logits: Tensor, oracle: Oracle
    ) -> Evidence:
        """Return what one output says, without taking it in.

        Args:
            setting: What it was drawn under.
            prompt: Before it.
            output: Its tokens, as emitted.
            logits: The reference's, of the rows that predict them [T, vocab].
            oracle: The reference under `setting.sampling`.
        """
        p = oracle.law(logits, prompt, output).cpu()
        chosen = torch.tensor(output)[:, None]
        own = p.gather(1, chosen).squeeze(1)
        factors = np.zeros((len(output), len(self.bets)))
        places = [i for i, bet in enumerate(self.bets) if bet[0] == setting.name]
        columns = [
            _factors(p, own, self._law(oracle, wrong, logits, prompt, output), chosen)
            for wrong in setting.mistakes.values()
        ]
        factors[:, places] = np.concatenate(columns, axis=1)
        return Evidence(factors, zones_of_emitted(oracle, own.tolist(), logits, prompt, output))

    def _law(
        self,
        oracle: Oracle,
        wrong: SamplingParams,
        logits: Tensor,
        prompt: Sequence[int],
        output: Sequence[int],
    ) -> Tensor:
        """Return the law of a mistake `[T, vocab]`."""
        other = Oracle(oracle.model, wrong)
        other.ends = oracle.ends
        return other.law(logits, prompt, output).cpu()

    def results(self) -> Iterator[ComponentResult]:
        """Return what was found: the mistakes, and the support."""
        steps = self.mixture.steps
        yield self.mixture.component(
            "parameters",
            steps,
            found=f"most like {self.mixture.best}",
            quiet=f"{steps} tokens drawn under every parameter follow the target's law",
        )
        support = self.margin.result()
        yield replace(support, name="parameter support")


def _factors(p: Tensor, own: Tensor, wrong: Tensor, chosen: Tensor) -> FloatArray:
    """Return log a(x) / p(x) for each share `[T, shares]`; 0 where p(x) = 0 or nothing of the law is left."""
    mass = torch.where(p > 0, wrong, 0.0).sum(1)
    usable = (own > 0) & (mass > 0)
    ratio = wrong.gather(1, chosen).squeeze(1) / (own * mass).clamp_min(1e-300)
    shares = torch.tensor(SHARES, dtype=torch.float64)
    mixed = (1 - KEPT) * ((1 - shares) + shares * ratio[:, None]) + KEPT
    factors: FloatArray = torch.where(usable[:, None], mixed.log(), 0.0).numpy()
    return factors
