"""The auditor's own q: what the draft would say after every prefix of an emitted text.

Alternatives may depend on the prompt and the tokens before, nothing else; so q comes from running the
draft along the emitted text, also where the decoder drafted nothing, never from what it says it drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from specbench.audit.lumping import BLOCK_VALUES
from specbench.audit.reference import Oracle
from specbench.audit.regimes import draft_logits
from specbench.decoding.processing import SamplingTensors
from specbench.decoding.random_numbers import RoundRandom, stream_keys
from specbench.records import SamplingParams
from specbench.runtime.protocols import DraftContext, Drafter, Strategy
from specbench.runtime.runner import decoder_layers
from specbench.strategies.draft import ModelDrafter
from specbench.strategies.early_exit import EarlyExitDrafter


class DraftLaw(Protocol):
    """Gives q along outputs of one prompt."""

    def laws(self, prompt: Sequence[int], output: Sequence[int], target_logits: Tensor, p: Tensor) -> Tensor:
        """Return q at every token of an output, `[T, V]` float64.

        `target_logits` and p `[T, V]` are the reference's; a draft that says nothing at a place has q = p.
        """
        ...


class SyntheticLaw:
    """The target's logits with noise, processed as the target's."""

    def __init__(self, oracle: Oracle, scale: float) -> None:
        self.oracle = oracle
        self.scale = scale

    def laws(self, prompt: Sequence[int], output: Sequence[int], target_logits: Tensor, p: Tensor) -> Tensor:
        """Return q; see `DraftLaw`."""
        places = len(prompt) + torch.arange(len(output), device=target_logits.device)
        q = torch.empty_like(p, device=target_logits.device)
        step = max(1, BLOCK_VALUES // p.shape[-1])
        for start in range(0, len(q), step):
            rows = slice(start, start + step)
            noisy = draft_logits(target_logits[rows], places[rows], self.scale)
            q[rows] = self.oracle.law(noisy, prompt, output, start=start)
        return q


class ModelLaw:
    """A draft model, or the target's first layers, by plain forwards along the text."""

    def __init__(self, drafter: ModelDrafter | EarlyExitDrafter, sampling: SamplingParams) -> None:
        self.drafter = drafter
        self.oracle = Oracle(drafter.runner.model, sampling)

    def laws(self, prompt: Sequence[int], output: Sequence[int], target_logits: Tensor, p: Tensor) -> Tensor:
        """Return q; see `DraftLaw`."""
        vocabulary = self.drafter.vocabulary
        with _first_layers(self.drafter.runner):
            rows = self.oracle.rows(vocabulary.read(prompt), [vocabulary.read(output)])
            logits = vocabulary.logits(next(rows)[1]).to(target_logits.device)
        missing = p.shape[-1] - logits.shape[-1]
        if missing:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return self.oracle.law(logits, prompt, output)


class CertainLaw:
    """A drafter without a model, asked again at every prefix for its next token."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        zero = torch.zeros(1, dtype=torch.int64)
        self.random = RoundRandom(stream_keys([0]), zero, zero)
        self.sampling = SamplingTensors.of([SamplingParams()])

    def laws(self, prompt: Sequence[int], output: Sequence[int], target_logits: Tensor, p: Tensor) -> Tensor:
        """Return q; see `DraftLaw`."""
        del target_logits
        q = p.clone()
        tokens = list(prompt)
        self.drafter.prefill(0, [tokens], {})
        for place, token in enumerate(output):
            proposal = self.drafter.propose(
                DraftContext([tokens], [1], self.sampling, self.random, prompts=[len(prompt)], slots=[1])
            )
            if proposal.offered[0]:
                q[place] = 0.0
                q[place, int(proposal.tokens[0, 0])] = 1.0
            tokens.append(token)
        self.drafter.release([0])
        return q


@contextmanager
def _first_layers(runner: Any) -> Iterator[None]:
    """Let plain forwards of the model stop where this runner's do."""
    if runner.num_layers is None:
        yield
        return
    parent, name = decoder_layers(runner.model)
    layers = getattr(parent, name)
    parent._modules[name] = layers[: runner.num_layers]
    try:
        yield
    finally:
        parent._modules[name] = layers


def own_law(strategy: Strategy, sampling: SamplingParams) -> DraftLaw | None:
    """Return the law of a strategy's own drafter; None where there is no way to know it."""
    drafter = strategy.drafter
    if drafter is None:
        return None
    if isinstance(drafter, ModelDrafter | EarlyExitDrafter):
        return ModelLaw(drafter, sampling)
    remembers = getattr(drafter, "corpus", None) is not None  # then more than the prefix decides
    return CertainLaw(drafter) if not drafter.runners and not remembers else None
