"""What a run leaves behind: the raw counts of METRICS.md, and what was asked for.

Everything that generates text produces these; everything that judges reads them. Times are seconds on
one monotonic clock whose zero is the start of the schedule. What was not measured is `None`, never 0.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from specbench.errors import UsageError

SCHEMA_VERSION = 1
"""Bumped whenever the meaning of a stored field changes (CHANGELOG.md lists it first)."""

GENERATE_ORDER = ("temperature", "top_k", "top_p", "min_p")
"""The order in which transformers' `generate` applies what shapes a distribution."""

Phase = Literal["prefill", "decode", "mixed"]
Dispatch = Literal["eager", "compiled", "graph", "capture"]
EndedBy = Literal["none", "eos", "stop", "budget"]
FinishReason = Literal["eos", "stop", "length", "context", "error", "cancelled"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is to be sampled, and what ends it.

    `temperature` 0 is the point mass on the most likely token (lowest id on ties). `top_k` 0, `top_p` 1
    and `min_p` 0 are off. `order` is the order in which the engine applies them: engines differ.

    Before them, in this order, as in transformers' `generate`: `logit_bias` pairs (token id, what is added
    to its logit); `repetition_penalty` (Keskar et al. 1909.05858: over prompt and output, positive logits
    divided, negative multiplied); `presence_penalty` once and `frequency_penalty` times the count for each
    token of the output so far (subtracted, as OpenAI's API defines them); `bad_words`, token sequences
    whose last token is forbidden where the others precede it; `min_new_tokens`, before which neither EOS
    nor a stop id can be sampled; `grammar` (`json:`, `regex:` or `choice:`), which says itself when EOS may
    come, and so excludes `min_new_tokens` and `ignore_eos`.

    The output ends at EOS unless `ignore_eos`, at any of `stop_token_ids`, or with the token that completes
    one of `stop_strings` in the output's text; that token is kept. `logprobs` n records for every token
    its log-probability and those of the n most likely ones; None records nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    order: tuple[str, ...] = GENERATE_ORDER
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    logprobs: int | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        """Refuse values that have no meaning, naming the one that is wrong."""
        checks = (
            (0 <= self.temperature < math.inf, "temperature", "0 or more, finite"),
            (self.top_k >= 0, "top_k", "0 (off) or more"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min_p", "between 0 and 1"),
            (self.max_new_tokens >= 0, "max_new_tokens", "0 or more"),
            (sorted(self.order) == sorted(GENERATE_ORDER), "order", f"a permutation of {GENERATE_ORDER}"),
            (0 < self.repetition_penalty < math.inf, "repetition_penalty", "above 0; 1 is off"),
            (math.isfinite(self.presence_penalty), "presence_penalty", "a finite number"),
            (math.isfinite(self.frequency_penalty), "frequency_penalty", "a finite number"),
            (_is_bias(self.logit_bias), "logit_bias", "pairs (token id, finite bias), no id twice"),
            (all(self.bad_words) and _are_ids(sum(self.bad_words, ())), "bad_words", "lists of token ids"),
            (
                0 <= self.min_new_tokens <= self.max_new_tokens,
                "min_new_tokens",
                f"between 0 and max_new_tokens, {self.max_new_tokens}",
            ),
            (_are_ids(self.stop_token_ids), "stop_token_ids", "token ids"),
            (
                all(self.stop_strings),
                "stop_strings",
                "strings of at least one character",
            ),
            (self.logprobs is None or self.logprobs >= 0, "logprobs", "None, or 0 or more"),
            (
                not (self.ignore_eos and self.grammar),
                "ignore_eos",
                "False beside a grammar, which ends with EOS",
            ),
            (
                not (self.min_new_tokens and self.grammar),
                "min_new_tokens",
                "0 beside a grammar, which states the least length itself",
            ),
        )
        for holds, name, expected in checks:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected {expected}")

    @property
    def named_tokens(self) -> tuple[int, ...]:
        """Return the token ids that these parameters name; a model must have them."""
        biased = tuple(token for token, _ in self.logit_bias)
        return biased + sum(self.bad_words, ()) + self.stop_token_ids


def _are_ids(values: Sequence[int]) -> bool:
    return all(value >= 0 for value in values)


def _is_bias(pairs: Sequence[tuple[int, float]]) -> bool:
    ids = [token for token, _ in pairs]
    return _are_ids(ids) and len(set(ids)) == len(ids) and all(math.isfinite(bias) for _, bias in pairs)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, rendered to token ids, with its own sampling and its own stream of random numbers."""

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    prompt_id: str = ""
    arrival: float = 0.0


def samples(request: Request, num: int) -> tuple[Request, ...]:
    """Return `num` requests for samples of one prompt, ids from the request's on, with distinct streams.

    Served together under `Schedule.share_prefill` they share one prefill. The first is the request itself.
    """
    first = request.sampling.seed
    seeds = [first, *(derived_seed(first, "sample", i) for i in range(1, num))]
    return tuple(
        replace(request, id=request.id + i, sampling=replace(request.sampling, seed=seed))
        for i, seed in enumerate(seeds)
    )


def derived_seed(*parts: object) -> int:
    """Return a seed of 56 bits, all of which depend on every part."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Requests and how they are offered.

    With `concurrency` the loop is closed: that many clients each send their next request when the last
    one finished, and a request's arrival is that moment. Without it requests arrive at their `arrival`.
    `share_prefill` lets requests with the same prompt that are admitted together share one prefill;
    `record_drafts` keeps draft ids and their q. `samples` consecutive requests belong to one prompt: a
    client sends them together, and they are admitted together.
    """

    requests: tuple[Request, ...]
    concurrency: int | None = None
    share_prefill: bool = False
    record_drafts: bool = False
    samples: int = 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One target forward, however many requests shared it.

    `forward_s` is the part of `wall_s` spent inside model forwards (target and draft); `host_s` is what
    remains of `wall_s` after draft, verify and commit.
    """

    step: int
    batch: int
    tokens_in: int
    tokens_padded: int
    context_max: int
    phase: Phase
    started: float
    wall_s: float
    draft_s: float | None
    verify_s: float | None
    commit_s: float | None
    host_s: float | None
    forward_s: float | None
    dispatch: Dispatch
    kv_committed: int
    kv_lookahead: int
    kv_draft: int


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One (step, request). `accepted` is before any truncation, `emitted` after it.

    Where drafts are recorded: the offered tokens, q of each, and in trees each one's parent (-1: none).
    """

    step: int
    request: int
    round: int
    drafted: int
    draft_depth: int
    accepted: int
    rejected: bool
    emitted: int
    ended_by: EndedBy
    draft_tokens: tuple[int, ...] | None = None
    draft_probs: tuple[float, ...] | None = None
    draft_parents: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at the place of one emitted token, in nats.

    `raw` is under the model's own softmax, `processed` under the distribution that was sampled (0 for the
    certain token of temperature 0). `top_raw` and `top_processed` are the n most likely (token, logprob).
    """

    raw: float
    processed: float
    top_raw: tuple[tuple[int, float], ...] = ()
    top_processed: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request from arrival to finish. Chunk i holds `chunk_sizes[i]` of the output tokens, in order.

    `logprobs` has one entry per output token where the request asked for them.
    """

    request: int
    prompt_id: str
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    sampling: SamplingParams
    arrival: float
    first_scheduled: float | None
    chunk_times: tuple[float, ...]
    chunk_sizes: tuple[int, ...]
    finished: float
    finish_reason: FinishReason
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """What one strategy holds in memory; bytes, per token where the name says so."""

    target_weights: int | None = None
    draft_weights: int | None = None
    target_kv_per_token: int | None = None
    draft_kv_per_token: int | None = None
    lookahead_tokens: int | None = None
    peak_bytes: int | None = None
    peak_source: str | None = None


@dataclass(frozen=True, slots=True)
class CellKey:
    """What a cell of the matrix is: one strategy on one workload, temperature and load."""

    workload: str
    temperature: float
    load: str
    strategy: str

    def __str__(self) -> str:
        """Return the name of the cell, the same string everywhere."""
        return f"{self.workload} T={self.temperature:g} {self.load} {self.strategy}"


@dataclass(frozen=True, slots=True)
class Serving:
    """All records of one `serve` call: a slice of one cell within one repeat.

    `unit` numbers the slices of a repeat; step and request numbers are unique within one serving.
    `duration_s` is the wall time from the start of the schedule to its last finish.
    """

    cell: CellKey
    repeat: int
    unit: int
    steps: tuple[StepRecord, ...]
    rounds: tuple[RoundRecord, ...]
    requests: tuple[RequestRecord, ...]
    duration_s: float


@dataclass(frozen=True, slots=True)
class CellRecords:
    """Everything recorded of one cell, over all repeats."""

    key: CellKey
    servings: tuple[Serving, ...]
    memory: MemoryRecord = field(default_factory=MemoryRecord)


def plain(value: Any) -> Any:
    """Return a dataclass as plain dicts and lists, ready for JSON."""
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


def sampling_from(values: Mapping[str, Any]) -> SamplingParams:
    """Rebuild sampling parameters from their stored form."""
    known = {name: values[name] for name in SamplingParams.__dataclass_fields__ if name in values}
    for name in ("stop_token_ids", "order", "stop_strings"):
        if name in known:
            known[name] = tuple(known[name])
    for name in ("logit_bias", "bad_words"):
        if name in known:
            known[name] = tuple(tuple(entry) for entry in known[name])
    return SamplingParams(**known)


def read_document(path: Path, name: str, *, kind: str | None = None, remedy: str) -> dict[str, Any]:
    """Read a JSON document that specbench wrote, in this version or an older one.

    Args:
        path: The file.
        name: What it is to users: "run", "baseline".
        kind: What its entry `kind` must say, if documents of this name have one.
        remedy: The hint where the file is missing, damaged or something else.

    Raises:
        UsageError: no readable file, no such document, or one of a newer specbench.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UsageError(f"cannot read {name} {path}: {problem.strerror or problem}", hint=remedy) from None
    except ValueError as problem:
        raise UsageError(f"{name} {path} is not readable JSON: {problem}", hint=remedy) from None
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise UsageError(f"{path} is no {name} of specbench", hint=remedy)
    version = document.get("schema_version")
    if not isinstance(version, int):
        raise UsageError(f"{path} is no {name} of specbench: schema_version is missing", hint=remedy)
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{name} {path} has schema version {version}; this specbench reads up to {SCHEMA_VERSION}",
            hint="upgrade specbench",
        )
    return document
