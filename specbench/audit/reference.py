"""The oracle: what the target itself would sample, by the plainest possible computation.

Shares no code with the decoder under audit. Full forwards without a key-value cache, without padding, and
its own float64 implementation of the sampling parameters, in the order they declare.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specbench.audit.chi_squared import Continuation, ExpectedTable
from specbench.errors import ModelError, UsageError
from specbench.records import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[int, int, int], None]
"""Called with the depth (1 .. horizon), the prefixes of that depth scored so far, and how many there are."""

CHUNK_VALUES = 4_000_000
"""Most probabilities held at a time [rows * vocab]: 32 MB in float64, and a few temporaries of that size."""


ROW_VALUES = 24_000_000
"""Most logits of one forward over whole outputs [rows * vocab]: 96 MB in float32."""


# From logits to the distribution that is sampled


def target_distribution(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the distribution that `sampling` makes of each row of logits, in float64.

    The parameters mean what they mean in transformers' `generate`, and are applied in `sampling.order`:

    - temperature: logits are divided by it. 0 is the point mass on the largest logit, lowest id on ties.
    - top_k: tokens below the k-th largest logit go; all that tie with the k-th stay.
    - top_p: the least likely tokens go as long as they hold at most 1 - top_p together, so the token that
      crosses the mass stays. Between equal logits at the edge the lower ids go first, which is what
      transformers does on a CPU; engines differ there.
    - min_p: tokens less likely than min_p times the most likely one go.

    Each sees the renormalised result of the one before, and none removes the most likely token.

    Args:
        logits: Unprocessed logits [..., vocab]; -inf is a token that cannot be sampled.
        sampling: The parameters.

    Returns:
        Probabilities [..., vocab], float64.

    Raises:
        ModelError: A row holds NaN, +inf, or nothing but -inf.
    """
    largest = logits.amax(dim=-1, keepdim=True)
    if not bool(torch.isfinite(largest).all()):
        raise ModelError("the target's logits are not finite", hint="load it in float32 or bfloat16")
    if sampling.temperature == 0:
        ids = torch.arange(logits.shape[-1], device=logits.device)
        winner = torch.where(logits == largest, ids, logits.shape[-1]).amin(dim=-1)
        return torch.nn.functional.one_hot(winner, logits.shape[-1]).to(torch.float64)
    scores = logits
    for name in sampling.order:
        scores = _STEPS[name](scores, sampling)
    return scores.softmax(dim=-1, dtype=torch.float64)


def _apply_temperature(scores: Tensor, sampling: SamplingParams) -> Tensor:
    return scores if sampling.temperature == 1 else scores.double() / sampling.temperature


def _apply_top_k(scores: Tensor, sampling: SamplingParams) -> Tensor:
    if not 0 < sampling.top_k < scores.shape[-1]:
        return scores
    scores = scores.double()
    kth_largest = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < kth_largest, -math.inf)


def _apply_top_p(scores: Tensor, sampling: SamplingParams) -> Tensor:
    if sampling.top_p >= 1:
        return scores
    scores = scores.double()
    ascending, ids = scores.sort(dim=-1, stable=True)
    mass_up_to_here = ascending.softmax(dim=-1).cumsum(dim=-1)
    goes = mass_up_to_here <= 1 - sampling.top_p
    goes[..., -1] = False
    return scores.masked_fill(torch.zeros_like(goes).scatter(-1, ids, goes), -math.inf)


def _apply_min_p(scores: Tensor, sampling: SamplingParams) -> Tensor:
    if sampling.min_p <= 0:
        return scores
    scores = scores.double()
    probs = scores.softmax(dim=-1)
    return scores.masked_fill(probs < sampling.min_p * probs.amax(dim=-1, keepdim=True), -math.inf)


_STEPS: Mapping[str, Callable[[Tensor, SamplingParams], Tensor]] = {
    "temperature": _apply_temperature,
    "top_k": _apply_top_k,
    "top_p": _apply_top_p,
    "min_p": _apply_min_p,
}


def adjusted(
    logits: Tensor,
    sampling: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    ends: Collection[int] = (),
) -> Tensor:
    """Return logits [vocab] in float64 after what `sampling` does to them whatever the temperature.

    In this order, as transformers' `generate` has it where it has it:

    - logit_bias is added.
    - repetition_penalty divides the positive and multiplies the negative logits of every token that the
      prompt or the output holds.
    - presence_penalty is subtracted once, frequency_penalty once per occurrence, from tokens of the output.
    - bad_words: the last token of a word is impossible after the others.
    - min_new_tokens: as long as the output is shorter, nothing that would end it is possible.

    Args:
        logits: Of one row, unprocessed.
        sampling: The parameters.
        prompt: Token ids before the output.
        output: Token ids after the prompt, all that precede the token to be sampled.
        ends: Token ids that end the output.
    """
    scores = logits.to(torch.float64).clone()
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *output}), device=scores.device)
        held = scores[seen]
        scores[seen] = torch.where(
            held > 0, held / sampling.repetition_penalty, held * sampling.repetition_penalty
        )
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = torch.bincount(torch.tensor(output, device=scores.device), minlength=len(scores))
        scores -= (counts > 0) * sampling.presence_penalty + counts * sampling.frequency_penalty
    text = (*prompt, *output)
    for *beginning, last in sampling.bad_words:
        if not beginning or text[-len(beginning) :] == tuple(beginning):
            scores[last] = -math.inf
    if len(output) < sampling.min_new_tokens:
        for token in ends:
            scores[token] = -math.inf
    return scores


# From prompts to laws


_ADJUSTMENTS = (
    "logit_bias",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "min_new_tokens",
)


class Oracle:
    """The target's exact next-token distributions and laws of continuations, under one set of parameters.

    Exact means up to the rounding of the model's own forward: load the target in float32 for a verdict.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        sampling: How the audited requests were sampled.
        eos_ids: Tokens that end a continuation, unless `sampling.ignore_eos`. The request's own
            `stop_token_ids` end it in any case.
        batch_tokens: Most tokens in one forward (one sequence may be longer). Bounds memory.
        allowed: What a grammar allows after an output [vocab] bool, given the output's token ids.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: SamplingParams,
        eos_ids: Sequence[int] = (),
        *,
        batch_tokens: int = 4096,
        allowed: Callable[[Sequence[int]], Tensor] | None = None,
    ) -> None:
        if model.training:
            raise UsageError(
                "the target is in training mode, its dropout is active", hint="call model.eval()"
            )
        self.model = model
        self.sampling = sampling
        self.ends = frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_ids)
        self.batch_tokens = batch_tokens
        self.allowed = allowed
        plain = SamplingParams()
        self.looks_back = allowed is not None or any(
            getattr(sampling, name) != getattr(plain, name) for name in _ADJUSTMENTS
        )
        self._last_row_only = "logits_to_keep" in inspect.signature(model.forward).parameters

    def next_distributions(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int] | None = None
    ) -> Tensor:
        """Return the distribution of the token after each sequence [num, vocab], float64, on the CPU.

        Sequences may differ in length: those of equal length share a forward, so nothing is padded. The
        first `prompt_lengths[i]` tokens are the prompt, the others output; None: all are prompt.
        """
        rows: list[Tensor | None] = [None] * len(sequences)
        for places, probs in self._scored(sequences, prompt_lengths or [len(s) for s in sequences]):
            for place, row in zip(places, probs, strict=True):
                rows[place] = row
        scored = [row for row in rows if row is not None]
        return torch.stack(scored) if scored else torch.empty(0, 0, dtype=torch.float64)

    def continuation_law(
        self,
        prompt: Sequence[int],
        horizon: int,
        *,
        floor: float = 0.0,
        max_leaves: int = 20_000,
        progress: Progress | None = None,
    ) -> ExpectedTable:
        """Return the joint probability of every continuation of `prompt` up to `horizon` tokens.

        Walks the tree of prefixes breadth first. A branch ends at `horizon` or at a token that ends the
        text. A branch less probable than `floor` is not followed further: its prefix becomes one
        truncated outcome that holds all its mass. With N draws, floor = 10 / N changes no cell of a table
        pooled to an expected count of 10: everything below such a prefix would be pooled anyway.
        What is lost is that tokens after a truncated prefix are not checked for support.

        Args:
            prompt: Token ids, at least one.
            horizon: Tokens per continuation; at most the request's `max_new_tokens`.
            floor: Least joint probability of a branch that is followed.
            max_leaves: Refuse larger tables.
            progress: Told how far the walk has come.

        Raises:
            UsageError: The table would exceed `max_leaves`, or the request could not be that long.
        """
        if not prompt:
            raise UsageError("a branch prompt is empty; expected at least one token")
        if not 1 <= horizon <= self.sampling.max_new_tokens:
            raise UsageError(
                f"horizon is {horizon}; expected 1 to max_new_tokens, {self.sampling.max_new_tokens}"
            )
        finished: dict[Continuation, float] = {}
        truncated: set[Continuation] = set()
        frontier: dict[Continuation, float] = {(): 1.0}
        for _ in range(horizon):
            nodes, frontier = frontier, {}
            for child, joint in self._children(prompt, nodes, progress):
                if child[-1] in self.ends or len(child) == horizon:
                    finished[child] = joint
                elif joint < floor:
                    finished[child] = joint
                    truncated.add(child)
                else:
                    frontier[child] = joint
                if len(finished) + len(frontier) > max_leaves:
                    raise UsageError(
                        f"more than {max_leaves} continuations of {horizon} tokens have positive probability",
                        hint="sample with a smaller top_k (3), shorten the horizon, or set a floor",
                    )
        return ExpectedTable(finished, frozenset(truncated))

    def rows(self, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> Iterator[tuple[int, Tensor]]:
        """Yield (i, logits [len(outputs[i]), vocab]) of the rows that predict each token of an output.

        One forward serves many outputs. They are filled up at the end, which causal attention never looks
        at from earlier rows.
        """
        vocab = int(self.model.config.get_text_config().vocab_size)
        order = sorted((i for i, output in enumerate(outputs) if output), key=lambda i: len(outputs[i]))
        while order:
            longest = len(outputs[order[-1]])
            size = min(self.batch_tokens // (len(prompt) + longest), ROW_VALUES // (longest * vocab))
            chunk = order[-max(1, size) :]
            del order[-len(chunk) :]
            texts = [[*prompt, *outputs[i]] for i in chunk]
            for i, logits in zip(chunk, self._output_rows(texts, len(prompt), longest), strict=True):
                yield i, logits[: len(outputs[i])]

    def along(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[tuple[int, Tensor]]:
        """Yield (i, logits) as `rows` does, of prompts and outputs; those of one prompt share forwards."""
        by_prompt: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for place, (prompt, _) in enumerate(texts):
            by_prompt[tuple(prompt)].append(place)
        for prompt, places in by_prompt.items():
            for index, logits in self.rows(prompt, [texts[place][1] for place in places]):
                yield places[index], logits

    @torch.inference_mode()
    def _output_rows(self, texts: Sequence[list[int]], start: int, longest: int) -> Tensor:
        """Return the logits [num, longest, vocab] of the rows that predict tokens `start` onward."""
        width = start + longest
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=self.model.device)
        wanted = torch.arange(start - 1, width - 1, device=ids.device)
        options = {"logits_to_keep": wanted} if self._last_row_only else {}
        with self.plain_attention():
            output = self.model(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **options
            )
        logits: Tensor = output.logits
        return logits if options else logits[:, wanted]

    def law(self, logits: Tensor, prompt: Sequence[int], output: Sequence[int], *, start: int = 0) -> Tensor:
        """Return the distributions [len(logits), vocab] that rows of `rows` are sampled from, float64.

        The first row predicts token `start` of the output.
        """
        if self.looks_back:
            logits = torch.stack(
                [
                    self._row(row, tuple(prompt), tuple(output[:place]))
                    for place, row in enumerate(logits, start)
                ]
            )
        return target_distribution(logits, self.sampling)

    def _children(
        self, prompt: Sequence[int], nodes: Mapping[Continuation, float], progress: Progress | None
    ) -> Iterator[tuple[Continuation, float]]:
        """Yield each possible one-token extension of prefixes of one depth, with its joint probability."""
        prefixes = list(nodes)
        done = 0
        texts = [(*prompt, *prefix) for prefix in prefixes]
        for places, probs in self._scored(texts, [len(prompt)] * len(texts)):
            for place, row in zip(places, probs, strict=True):
                prefix = prefixes[place]
                tokens = row.nonzero().flatten()
                for token, probability in zip(tokens.tolist(), row[tokens].tolist(), strict=True):
                    yield (*prefix, token), nodes[prefix] * probability
            done += len(places)
            if progress is not None:
                progress(len(prefixes[0]) + 1, done, len(prefixes))

    def _scored(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yield (places, distributions [len(places), vocab] on the CPU) until every sequence is scored."""
        by_length: dict[int, list[int]] = defaultdict(list)
        for place, sequence in enumerate(sequences):
            by_length[len(sequence)].append(place)
        most_rows = max(1, CHUNK_VALUES // int(self.model.config.get_text_config().vocab_size))
        for length, places in by_length.items():
            if length == 0:
                raise UsageError("cannot score an empty sequence; expected at least one token")
            size = max(1, min(most_rows, self.batch_tokens // length))
            for start in range(0, len(places), size):
                chunk = places[start : start + size]
                scored = [sequences[place] for place in chunk]
                yield chunk, self._forward(scored, [prompt_lengths[place] for place in chunk])

    @contextmanager
    def plain_attention(self) -> Iterator[None]:
        """Score under transformers' own attention: a decoder may have put its own into the model."""
        current = self.model.config._attn_implementation
        if current in ("sdpa", "eager"):
            yield
            return
        self.model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            self.model.set_attn_implementation(current)

    @torch.inference_mode()
    def _forward(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> Tensor:
        """Return the distribution after each of some sequences of one length [num, vocab]."""
        ids = torch.tensor([list(sequence) for sequence in sequences], device=self.model.device)
        options = {"logits_to_keep": 1} if self._last_row_only else {}
        with self.plain_attention():
            output = self.model(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **options
            )
        logits = output.logits[:, -1]
        if self.looks_back:
            rows = zip(logits, sequences, prompt_lengths, strict=True)
            logits = torch.stack([self._row(row, text[:length], text[length:]) for row, text, length in rows])
        return target_distribution(logits, self.sampling).cpu()

    def _row(self, logits: Tensor, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """Adjust one row, and forbid what the grammar does not allow."""
        scores = adjusted(logits, self.sampling, prompt, output, self.ends)
        if self.allowed is not None:
            scores = scores.masked_fill(~self.allowed(output).to(scores.device), -math.inf)
        return scores
