"""From logits and sampling parameters to the actual sampling distribution of every row.

Ordinary decoding, drafting and verification all call `process`, so the target's p and the draft's q can
never be two different transformations. Conventions are those of transformers' `generate`: top-k keeps
ties with the k-th logit, top-p keeps the token that crosses the mass, min-p compares with the largest
probability. Temperature 0 is the point mass on the most likely token, the lowest id on ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution
from specbench.records import SamplingParams

_NUCLEUS_GUESS = 512
"""How many of the largest probabilities are tried before top-p sorts the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of a batch, one entry per request `[B]`, and what any of them needs."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    order: tuple[str, ...]
    all_greedy: bool
    any_greedy: bool
    uses: frozenset[str]
    max_top_k: int

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> SamplingTensors:
        """Gather the parameters of a batch; raises ValueError if requests disagree on the order."""
        orders = {p.order for p in params}
        if len(orders) > 1:
            raise ValueError(f"one batch, two orders of processing: {sorted(orders)}")
        sampled = [p for p in params if p.temperature > 0]
        uses = {
            "temperature": any(p.temperature != 1 for p in sampled),
            "top_k": any(p.top_k > 0 for p in sampled),
            "top_p": any(p.top_p < 1 for p in sampled),
            "min_p": any(p.min_p > 0 for p in sampled),
        }

        def tensor(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=tensor([p.temperature for p in params], torch.float64),
            top_k=tensor([p.top_k for p in params], torch.int64),
            top_p=tensor([p.top_p for p in params], torch.float64),
            min_p=tensor([p.min_p for p in params], torch.float64),
            order=next(iter(orders)) if orders else SamplingParams().order,
            all_greedy=not sampled,
            any_greedy=len(sampled) < len(params),
            uses=frozenset(name for name, used in uses.items() if used),
            max_top_k=max((p.top_k for p in sampled), default=0),
        )

    def to(self, device: torch.device) -> SamplingTensors:
        """Return the same parameters on another device."""
        if self.temperature.device == device:
            return self
        return SamplingTensors(
            self.temperature.to(device),
            self.top_k.to(device),
            self.top_p.to(device),
            self.min_p.to(device),
            self.order,
            self.all_greedy,
            self.any_greedy,
            self.uses,
            self.max_top_k,
        )


def process(logits: Tensor, sampling: SamplingTensors) -> Distribution:
    """Return the sampling distribution of every row.

    Args:
        logits: `[B, R, V]`; R rows of one request share its parameters. Computed in float32, or in
            float64 if the logits are.
        sampling: parameters of the B requests.
    """
    if sampling.all_greedy:
        return Distribution.point(logits.argmax(-1))  # the first of equal maxima, as torch documents
    scores = logits if logits.dtype == torch.float64 else logits.float()
    for name in sampling.order:
        if name in sampling.uses:
            scores = _STEPS[name](scores, sampling)
    probs = scores.softmax(-1)
    if sampling.any_greedy:
        certain = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        probs = torch.where((sampling.temperature == 0)[:, None, None], certain, probs)
    return Distribution.dense(probs)


def _temperature(scores: Tensor, sampling: SamplingTensors) -> Tensor:
    safe = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
    return scores / safe.to(scores.dtype)[:, None, None]


def _top_k(scores: Tensor, sampling: SamplingTensors) -> Tensor:
    vocab = scores.shape[-1]
    largest = scores.topk(min(sampling.max_top_k, vocab), dim=-1).values
    last = (sampling.top_k.clamp(1, largest.shape[-1]) - 1)[:, None, None].expand(*scores.shape[:2], 1)
    threshold = largest.gather(-1, last)
    off = (sampling.top_k == 0)[:, None, None]
    return scores.masked_fill(scores < threshold.masked_fill(off, -torch.inf), -torch.inf)


def _top_p(scores: Tensor, sampling: SamplingTensors) -> Tensor:
    probs = scores.softmax(-1)
    mass = sampling.top_p.to(probs.dtype)[:, None, None]
    vocab = probs.shape[-1]
    ranked = None
    if probs.device.type == "cpu" and vocab > 4 * _NUCLEUS_GUESS:
        # A full sort of 49,152 entries costs 2 ms a row; the nucleus is nearly always far smaller.
        ranked = probs.topk(_NUCLEUS_GUESS, dim=-1).values
        if not bool((ranked.cumsum(-1)[..., -1:] >= mass).all()):
            ranked = None
    if ranked is None:
        ranked = probs.sort(dim=-1, descending=True).values
    size = 1 + (ranked.cumsum(-1)[..., :-1] < mass).sum(-1, keepdim=True)
    edge = ranked.gather(-1, size - 1)
    # Of the tokens that tie at the edge the higher ids stay, as in `generate`, however they were ranked.
    above, tied = probs > edge, probs == edge
    room = size - above.sum(-1, keepdim=True)
    kept = above | (tied & (tied.flip(-1).cumsum(-1).flip(-1) <= room))
    return scores.masked_fill(~kept & (mass < 1), -torch.inf)


def _min_p(scores: Tensor, sampling: SamplingTensors) -> Tensor:
    probs = scores.softmax(-1)
    floor = sampling.min_p.to(probs.dtype)[:, None, None] * probs.amax(-1, keepdim=True)
    return scores.masked_fill(probs < floor, -torch.inf)


_STEPS: dict[str, Callable[[Tensor, SamplingTensors], Tensor]] = {
    "temperature": _temperature,
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": _min_p,
}
