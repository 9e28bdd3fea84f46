"""Ordinary decoding by the reference itself: for controls, and to compare greedy outputs with.

The plainest loop there is: one token per forward, transformers' own cache where the model has one, unpadded.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specbench.audit.reference import Oracle, adjusted, target_distribution

ROWS = 64
"""Most sequences decoded together."""


class PlainSampler:
    """Draws outputs from the law that an `Oracle` describes, with a random generator of its own."""

    def __init__(self, oracle: Oracle, seed: int) -> None:
        self.oracle = oracle
        self.generator = torch.Generator().manual_seed(seed)
        parameters = inspect.signature(oracle.model.forward).parameters
        # `past_key_values` is called `cache` from transformers 5.24 on.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def draw(self, prompts: Sequence[Sequence[int]], most: int) -> list[tuple[int, ...]]:
        """Return one output per prompt, in order: up to `most` tokens, the one that ends it included."""
        outputs: list[tuple[int, ...]] = [()] * len(prompts)
        by_length: dict[int, list[int]] = {}
        for place, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(place)
        for places in by_length.values():
            for start in range(0, len(places), ROWS):
                chunk = places[start : start + ROWS]
                drawn = self._together([tuple(prompts[place]) for place in chunk], most)
                for place, output in zip(chunk, drawn, strict=True):
                    outputs[place] = output
        return outputs

    @torch.inference_mode()
    def _together(self, prompts: Sequence[tuple[int, ...]], most: int) -> list[tuple[int, ...]]:
        """Decode prompts of one length in one batch; rows that have ended are carried along unread."""
        model = self.oracle.model
        text = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
        outputs: list[list[int]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        cache: Any = None
        with self.oracle.plain_attention():
            while not all(ended) and len(outputs[0]) < most:
                given = {} if cache is None else {self._cache_argument: cache}
                fed = text if cache is None else text[:, -1:]
                found = model(input_ids=fed, attention_mask=torch.ones_like(text), use_cache=True, **given)
                cache = getattr(found, self._cache_argument, None)
                law = self._law(found.logits[:, -1], prompts, outputs)
                tokens = torch.multinomial(law, 1, generator=self.generator)
                text = torch.cat([text, tokens.to(text.device)], dim=1)
                for row, token in enumerate(tokens[:, 0].tolist()):
                    outputs[row].append(token)
                    ended[row] = ended[row] or token in self.oracle.ends
        return [self._until_end(output) for output in outputs]

    def _law(
        self, logits: Tensor, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return what each row is sampled from `[num, vocab]`, float64, on the CPU."""
        oracle = self.oracle
        if oracle.looks_back:
            rows = zip(logits, prompts, outputs, strict=True)
            logits = torch.stack(
                [adjusted(row, oracle.sampling, prompt, output, oracle.ends) for row, prompt, output in rows]
            )
        return target_distribution(logits, oracle.sampling).cpu()

    def _until_end(self, output: Sequence[int]) -> tuple[int, ...]:
        """Cut an output after the first token that ends it."""
        ends = (place + 1 for place, token in enumerate(output) if token in self.oracle.ends)
        return tuple(output[: next(ends, len(output))])
