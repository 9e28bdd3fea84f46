"""Whether every alternative is a law at every token of an audit: not negative, and 1 together.

A normaliser off by 1e-6 is one nat after a million tokens, for or against a decoder that did nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from specbench.audit import self_test, session
from specbench.audit.alternatives import MIX, Alternatives, Scores
from specbench.audit.budget import Budget

STRATEGY = "draft:k=3"
TOKENS: Mapping[str, int] = {"toy": self_test.TOKENS, "bundled pair": 1500}
"""Scored tokens of one audit, over its regimes, on each model; both run in float32."""
TOLERANCE = 1e-6
CHUNK_VALUES = 4_000_000


@dataclass(slots=True)
class Worst:
    """What was seen of the alternatives' laws: the least probability, and the largest errors.

    `sum_error` is |sum - 1|; `factor_error` is between the factor that the audit used for an emitted token
    and the law over p there, relative to it.
    """

    tokens: int = 0
    alternatives: int = 0
    laws: int = 0
    smallest: float = 1.0
    sum_error: float = 0.0
    factor_error: float = 0.0

    def look(self, usable: Alternatives, p: Tensor, tokens: Tensor, q: Tensor | None, scores: Scores) -> None:
        """Check the laws of all alternatives before some tokens, `p` and `q` `[T, V]`."""
        self.tokens += len(p)
        self.alternatives = max(self.alternatives, len(usable.names))
        step = max(1, CHUNK_VALUES // p.shape[-1])
        for first in range(0, len(p), step):
            rows = slice(first, first + step)
            self._look(
                usable, p[rows], tokens[rows], None if q is None else q[rows], scores.log_factors[rows]
            )

    def _look(
        self, usable: Alternatives, p: Tensor, tokens: Tensor, q: Tensor | None, log_factors: Any
    ) -> None:
        at = tokens[:, None]
        # p as it is, not normalised again: what is wrong with it would be wrong with the evidence.
        target = p.double()
        chosen = target.gather(1, at).squeeze(1)
        column = 0
        for direction in usable.directions:
            for strength in direction.strengths:
                law = (1 - MIX) * usable.law(direction.name, strength, p, q) + MIX * target
                self.laws += len(law)
                self.smallest = min(self.smallest, float(law.min()))
                self.sum_error = max(self.sum_error, float((law.sum(-1) - 1).abs().max()))
                used = torch.from_numpy(np.exp(log_factors[:, column]))
                expected = law.gather(1, at).squeeze(1) / chosen
                possible = chosen > 0
                if bool(possible.any()):
                    errors = ((used - expected).abs() / expected)[possible]
                    self.factor_error = max(self.factor_error, float(errors.max()))
                column += 1

    @property
    def holds(self) -> bool:
        """Whether all were laws, and the laws are those that the audit bet on."""
        return self.smallest >= 0 and self.sum_error <= TOLERANCE and self.factor_error <= TOLERANCE


@contextmanager
def watched(worst: Worst) -> Iterator[None]:
    """Look at every token that is scored meanwhile, as it is handed to the e-process."""
    score = Alternatives.score

    def watching(usable: Alternatives, p: Tensor, tokens: Tensor, q: Tensor | None = None) -> Scores:
        scores = score(usable, p, tokens, q)
        worst.look(usable, p, tokens, q, scores)
        return scores

    with mock.patch.object(Alternatives, "score", watching):
        yield


def audit(bench: self_test.Bench, model: str, tokens: int, seed: int) -> dict[str, Any]:
    """Run one audit in float32 and return what was seen of its alternatives."""
    case = next(case for case in self_test.cases() if case.name == STRATEGY)
    subject = bench.subject(self_test.Job(replace(case, needs_text=model != "toy"), seed))
    subject = replace(subject, budget=Budget("normalisers", tokens, 1.0))
    worst = Worst()
    with watched(worst):
        session.audit(subject, STRATEGY, sequences_only=True)
    return {
        "vocab": subject.engine.runner.vocab,
        **{name: getattr(worst, name) for name in Worst.__slots__},
        "holds": worst.holds,
    }


def setup(seed: int) -> dict[str, Any]:
    """Return what the log's figures depend on."""
    return {"strategy": STRATEGY, "tokens": dict(TOKENS), "seed": seed}


def summary(done: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return what was seen on each model."""
    models = {name: dict(done[name][0]) for name in TOKENS if done.get(name)}
    holds = all(row["holds"] for row in models.values())
    return {
        "models": models,
        "tolerance": TOLERANCE,
        "holds": len(models) == len(TOKENS) or None if holds else False,
    }
