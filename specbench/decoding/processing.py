"""From logits and sampling parameters to the actual sampling distribution of every row.

Ordinary decoding, drafting and verification all call `process`, so the target's p and the draft's q can
never be two different transformations. Conventions are those of transformers' `generate`: top-k keeps
ties with the k-th logit, top-p keeps the token that crosses the mass, min-p compares with the largest
probability. Temperature 0 is the point mass on the most likely token, the lowest id on ties.

What depends on the history of a row (penalties, bad words, the least length) sees the committed tokens
and the row's own ancestors in the draft, as if they had been committed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution
from specbench.errors import UsageError
from specbench.records import SamplingParams

_NUCLEUS_GUESS = 512
"""How many of the largest probabilities are tried before top-p sorts the whole vocabulary."""

_OF_HISTORY = frozenset({"repetition", "presence", "bad_words", "min_new_tokens"})


@dataclass(frozen=True, slots=True)
class History:
    """What the rows of a window follow.

    `tokens[b]` is the prompt (its first `prompts[b]` tokens) and the committed output of request b.
    `nodes` `[B, N]` are draft tokens, and `ancestors` `[B, R, N]` says which of them row r follows: its own
    node and that node's ancestors. A row that follows no draft token has no ancestors.
    """

    tokens: Sequence[Sequence[int]]
    prompts: Sequence[int]
    nodes: Tensor
    ancestors: Tensor

    @classmethod
    def of_chain(cls, tokens: Sequence[Sequence[int]], prompts: Sequence[int], nodes: Tensor) -> History:
        """Return the history of the N + 1 rows over a chain of drafts `[B, N]`."""
        batch, num = nodes.shape
        follows = torch.ones(num + 1, num, dtype=torch.bool, device=nodes.device).tril(-1)
        return cls(tokens, prompts, nodes, follows.expand(batch, -1, -1))

    def last_row(self) -> History:
        """Return the history of the last row of each window alone."""
        return replace(self, ancestors=self.ancestors[:, -1:])

    def counts(self, vocab: int, *, output_only: bool) -> Tensor:
        """Return how often each token occurs in the history of each row, `[B, R, V]` float32."""
        device = self.nodes.device
        batch, rows, _ = self.ancestors.shape
        start = self.prompts if output_only else [0] * batch
        kept = [
            [token for token in list(tokens)[skip:] if token < vocab]
            for tokens, skip in zip(self.tokens, start, strict=True)
        ]
        flat = [row * vocab + token for row, tokens in enumerate(kept) for token in tokens]
        base = torch.bincount(torch.tensor(flat, dtype=torch.int64, device=device), minlength=batch * vocab)
        counts = base.reshape(batch, 1, vocab).float().expand(-1, rows, -1).contiguous()
        # A draft never proposes an id beyond the vocabulary, but rows may be padded with any.
        nodes = self.nodes.clamp(max=vocab - 1)[:, None].expand(-1, rows, -1)
        return counts.scatter_add_(-1, nodes, self.ancestors.float())

    def depths(self) -> Tensor:
        """Return how many draft tokens each row follows, `[B, R]`."""
        return self.ancestors.sum(-1)

    def produced(self) -> Tensor:
        """Return the output tokens that precede each row, `[B, R]`, drafts counted."""
        committed = [len(tokens) - start for tokens, start in zip(self.tokens, self.prompts, strict=True)]
        return torch.tensor(committed, device=self.nodes.device)[:, None] + self.depths()

    def tails(self, length: int, of: Collection[int]) -> dict[tuple[int, int], list[int]]:
        """Return the last `length` tokens that (request, row) follows, for the requests wanted."""
        nodes, follows = self.nodes.tolist(), self.ancestors.tolist()
        return {
            (request, row): [
                *self.tokens[request][-length:],
                *(token for token, kept in zip(nodes[request], follows_row, strict=True) if kept),
            ][-length:]
            for request in of
            for row, follows_row in enumerate(follows[request])
        }


def ancestors(parents: Tensor) -> Tensor:
    """Return which nodes each row of a tree's window follows, `[B, N + 1, N]`; row i + 1 follows node i.

    `parents` `[B, N]` is topological. Found by doubling: log2(N) products of boolean matrices.
    """
    batch, num = parents.shape
    nodes = torch.arange(num, device=parents.device)
    follows = (parents[..., None] == nodes) | torch.eye(num, dtype=torch.bool, device=parents.device)
    reach = 1
    while reach < num:
        follows = (follows.float() @ follows.float()) > 0
        reach *= 2
    return torch.cat([torch.zeros(batch, 1, num, dtype=torch.bool, device=parents.device), follows], 1)


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of a batch, one entry per request `[B]`, and what any of them needs."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    min_new_tokens: Tensor
    bias: tuple[Tensor, Tensor, Tensor]
    """(request, token id, what is added to its logit), one entry each per pair, `[n]`."""
    bad_words: tuple[tuple[tuple[int, ...], ...], ...]
    ends: tuple[tuple[int, ...], ...]
    """What `min_new_tokens` forbids: the EOS and stop ids of each request."""
    order: tuple[str, ...]
    all_greedy: bool
    any_greedy: bool
    uses: frozenset[str]
    max_top_k: int

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        device: torch.device | str = "cpu",
        *,
        eos_ids: Collection[int] = (),
    ) -> SamplingTensors:
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
            "bias": any(p.logit_bias for p in params),
            "repetition": any(p.repetition_penalty != 1 for p in params),
            "presence": any(p.presence_penalty != 0 or p.frequency_penalty != 0 for p in params),
            "bad_words": any(p.bad_words for p in params),
            "min_new_tokens": any(p.min_new_tokens > 0 for p in params),
        }

        def tensor(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        pairs = [(row, token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias]
        return cls(
            temperature=tensor([p.temperature for p in params]),
            top_k=tensor([p.top_k for p in params], torch.int64),
            top_p=tensor([p.top_p for p in params]),
            min_p=tensor([p.min_p for p in params]),
            repetition=tensor([p.repetition_penalty for p in params]),
            presence=tensor([p.presence_penalty for p in params]),
            frequency=tensor([p.frequency_penalty for p in params]),
            min_new_tokens=tensor([p.min_new_tokens for p in params], torch.int64),
            bias=(
                tensor([row for row, _, _ in pairs], torch.int64),
                tensor([token for _, token, _ in pairs], torch.int64),
                tensor([bias for _, _, bias in pairs]),
            ),
            bad_words=tuple(p.bad_words for p in params),
            ends=tuple(
                tuple(sorted({*p.stop_token_ids, *(() if p.ignore_eos else eos_ids)})) for p in params
            ),
            order=next(iter(orders)) if orders else SamplingParams().order,
            all_greedy=not sampled,
            any_greedy=len(sampled) < len(params),
            uses=frozenset(name for name, used in uses.items() if used),
            max_top_k=max((p.top_k for p in sampled), default=0),
        )

    @property
    def needs_history(self) -> bool:
        """Whether any request's distribution depends on more than the logits of the row."""
        return not self.uses.isdisjoint(_OF_HISTORY)

    def to(self, device: torch.device) -> SamplingTensors:
        """Return the same parameters on another device."""
        if self.temperature.device == device:
            return self
        return replace(
            self,
            temperature=self.temperature.to(device),
            top_k=self.top_k.to(device),
            top_p=self.top_p.to(device),
            min_p=self.min_p.to(device),
            repetition=self.repetition.to(device),
            presence=self.presence.to(device),
            frequency=self.frequency.to(device),
            min_new_tokens=self.min_new_tokens.to(device),
            bias=(self.bias[0].to(device), self.bias[1].to(device), self.bias[2].to(device)),
        )


def process(
    logits: Tensor,
    sampling: SamplingTensors,
    history: History | None = None,
    allowed: Tensor | None = None,
) -> Distribution:
    """Return the sampling distribution of every row.

    Args:
        logits: `[B, R, V]`; R rows of one request share its parameters. Computed in float32, or in
            float64 if the logits are.
        sampling: parameters of the B requests.
        history: what each row follows; needed where `sampling.needs_history`.
        allowed: `[B, R, V]` bool, what a grammar allows; None for everything.
    """
    constrained = allowed is not None or not sampling.uses.isdisjoint(_LOGIT_STEPS)
    if sampling.all_greedy and not constrained:
        return Distribution.point(logits.argmax(-1))  # the first of equal maxima, as torch documents
    scores = logits if logits.dtype == torch.float64 else logits.float()
    for name, step in _LOGIT_STEPS.items():
        if name in sampling.uses:
            if name in _OF_HISTORY and history is None:
                raise ValueError(f"'{name}' depends on the history of a row, and none was given")
            scores = step(scores, sampling, history)  # type: ignore[arg-type]
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if constrained and bool((scores.amax(-1) == -torch.inf).any()):
        raise UsageError(
            "bad words, biases or a grammar leave no token to sample",
            hint="loosen them: each of them holds at every position",
        )
    likeliest = scores.argmax(-1)
    if sampling.all_greedy:
        return Distribution.point(likeliest)
    for name in sampling.order:
        if name in sampling.uses:
            scores = _STEPS[name](scores, sampling)
    probs = scores.softmax(-1)
    if sampling.any_greedy:
        certain = torch.zeros_like(probs).scatter_(-1, likeliest[..., None], 1.0)
        probs = torch.where((sampling.temperature == 0)[:, None, None], certain, probs)
    return Distribution.dense(probs)


def _bias(scores: Tensor, sampling: SamplingTensors, history: History) -> Tensor:
    del history
    rows, tokens, bias = sampling.bias
    inside = tokens < scores.shape[-1]  # a draft's vocabulary may be smaller
    scores = scores.clone()
    scores[rows[inside], :, tokens[inside]] += bias[inside, None].to(scores.dtype)
    return scores


def _repetition(scores: Tensor, sampling: SamplingTensors, history: History) -> Tensor:
    seen = history.counts(scores.shape[-1], output_only=False) > 0
    penalty = sampling.repetition.to(scores.dtype)[:, None, None]
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def _presence(scores: Tensor, sampling: SamplingTensors, history: History) -> Tensor:
    counts = history.counts(scores.shape[-1], output_only=True).to(scores.dtype)
    presence = sampling.presence.to(scores.dtype)[:, None, None]
    frequency = sampling.frequency.to(scores.dtype)[:, None, None]
    return scores - presence * (counts > 0) - frequency * counts


def _bad_words(scores: Tensor, sampling: SamplingTensors, history: History) -> Tensor:
    using = [request for request, words in enumerate(sampling.bad_words) if words]
    longest = max(len(word) for request in using for word in sampling.bad_words[request])
    places = [
        (request, row, word[-1])
        for (request, row), tail in history.tails(max(1, longest - 1), using).items()
        for word in sampling.bad_words[request]
        if word[-1] < scores.shape[-1] and (len(word) == 1 or tuple(tail[1 - len(word) :]) == word[:-1])
    ]
    return _forbid(scores, places)


def _min_new_tokens(scores: Tensor, sampling: SamplingTensors, history: History) -> Tensor:
    early = (history.produced() < sampling.min_new_tokens[:, None]).tolist()
    places = [
        (request, row, token)
        for request, rows in enumerate(early)
        for row, is_early in enumerate(rows)
        if is_early
        for token in sampling.ends[request]
        if token < scores.shape[-1]
    ]
    return _forbid(scores, places)


def _forbid(scores: Tensor, places: Sequence[tuple[int, int, int]]) -> Tensor:
    """Make tokens impossible at (request, row, token)."""
    if not places:
        return scores
    scores = scores.clone()
    scores[tuple(torch.tensor(places, device=scores.device).T)] = -torch.inf
    return scores


_LOGIT_STEPS: dict[str, Callable[[Tensor, SamplingTensors, History], Tensor]] = {
    "bias": _bias,
    "repetition": _repetition,
    "presence": _presence,
    "bad_words": _bad_words,
    "min_new_tokens": _min_new_tokens,
}
"""What changes logits whatever the temperature, in the order in which `generate` does it."""


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
