"""What each metric means: its label, unit and formula in words, and what other tools call or do.

The keys are the fields of `CellSummary`. Report headers and `specbench explain` read this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from specbench.errors import UsageError, did_you_mean

Unit = Literal[
    "count", "tokens", "ratio", "share", "seconds", "tokens/s", "requests/s", "bytes", "per 100 steps"
]
Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric. `elsewhere` says how a tool or paper defines or calls it, as far as that is known."""

    key: str
    label: str
    unit: Unit
    formula: str
    better: Better
    note: str = ""
    elsewhere: Mapping[str, str] = field(default_factory=dict)


_PER_REQUEST = "The mean over requests of the ratio, where the pooled figure divides sums; they can disagree."
_MEAN_STEP = "mean over decode steps"

_TABLE = (
    # Counts.
    Definition("requests", "requests", "count", "requests offered", "neither"),
    Definition("failures", "failures", "count", "requests that ended with an error", "lower"),
    Definition(
        "output_tokens", "output tokens", "tokens", "tokens in the outputs of all requests", "neither"
    ),
    Definition(
        "decode_rounds",
        "decode rounds",
        "count",
        "(step, request) rows; round 0, the prefill, left out",
        "neither",
    ),
    Definition(
        "draft_rounds", "rounds with a draft", "count", "decode rounds that drafted a token", "neither"
    ),
    Definition("drafted", "drafted", "tokens", "sum of draft tokens or tree nodes offered", "neither"),
    Definition(
        "accepted", "accepted", "tokens", "sum of draft tokens kept by verification, untruncated", "neither"
    ),
    Definition(
        "tested", "tested", "tokens", "accepted, plus one for each round that had a rejection", "neither"
    ),
    Definition(
        "emitted", "emitted", "tokens", "sum of tokens that decode rounds put into the output", "neither"
    ),
    # Acceptance.
    Definition(
        "tokens_per_target_step",
        "tokens per target step",
        "tokens",
        "emitted / decode rounds",
        "higher",
        note="The headline. Counts every step, also those without a draft; 1 for ordinary decoding.",
    ),
    Definition(
        "tokens_per_target_step_per_request",
        "tokens per target step, per request",
        "tokens",
        "mean over requests of emitted / decode rounds",
        "higher",
        note=_PER_REQUEST,
    ),
    Definition(
        "acceptance_length",
        "acceptance length",
        "tokens",
        "1 + accepted / rounds with a draft",
        "higher",
        note="The bonus or recovered token is included.",
        elsewhere={
            "vLLM": "the same: bonus included; steps without a draft are left out, "
            "which flatters n-gram and suffix drafts",
            "SGLang": "bonus included",
            "Spec-Bench": "mean accepted tokens: bonus included, 1.00 for ordinary decoding",
        },
    ),
    Definition(
        "acceptance_length_per_request",
        "acceptance length, per request",
        "tokens",
        "mean over requests of 1 + accepted / rounds with a draft",
        "higher",
        note=_PER_REQUEST,
    ),
    Definition(
        "draft_acceptance_rate",
        "draft acceptance rate",
        "share",
        "accepted / drafted",
        "higher",
        elsewhere={
            "vLLM": "acceptance rate",
            "llama.cpp": "acceptance rate",
            "NeMo-Skills": "its acceptance rate is acceptance length / (k + 1), another figure",
        },
    ),
    Definition(
        "draft_acceptance_rate_per_request",
        "draft acceptance rate, per request",
        "share",
        "mean over requests of accepted / drafted",
        "higher",
        note=_PER_REQUEST,
    ),
    Definition(
        "alpha",
        "alpha",
        "share",
        "accepted / tested",
        "higher",
        note="For token-wise rejection it estimates the mean of sum_x min(p(x), q(x)) over tested positions, "
        "for exact match with a sampled draft that of sum_x p(x) q(x), for block and tree rules neither.",
        elsewhere={"Leviathan et al.": "alpha"},
    ),
    Definition(
        "alpha_per_request",
        "alpha, per request",
        "share",
        "mean over requests of accepted / tested",
        "higher",
        note=_PER_REQUEST,
    ),
    Definition("wasted_draft_share", "wasted draft share", "share", "1 - accepted / drafted", "lower"),
    Definition(
        "wasted_draft_share_per_request",
        "wasted draft share, per request",
        "share",
        "mean over requests of 1 - accepted / drafted",
        "lower",
        note=_PER_REQUEST,
    ),
    Definition(
        "joint_acceptance",
        "joint acceptance at i",
        "share",
        "rounds that accepted at least i / rounds with a draft",
        "higher",
        note="Never rises with i; 1 + its sum is the acceptance length.",
        elsewhere={"vLLM": "per-position acceptance rate"},
    ),
    Definition(
        "joint_acceptance_per_request",
        "joint acceptance at i, per request",
        "share",
        "mean over requests of rounds that accepted at least i / rounds with a draft",
        "higher",
        note=_PER_REQUEST,
    ),
    Definition(
        "conditional_acceptance",
        "conditional acceptance at i",
        "share",
        "rounds that accepted at least i / rounds of depth i or more that accepted at least i - 1",
        "higher",
        note="Beside each share, the number of rounds behind it. The ratio of joint rates is not this where "
        "the number of drafted tokens varies.",
    ),
    Definition(
        "conditional_acceptance_per_request",
        "conditional acceptance at i, per request",
        "share",
        "mean over requests of the conditional acceptance at i",
        "higher",
        note="Beside each share, the number of requests behind it.",
    ),
    Definition(
        "mean_draft_depth",
        "mean draft depth",
        "tokens",
        "sum of longest root-to-leaf paths / rounds with a draft",
        "neither",
        note="k, where k is fixed.",
    ),
    # Time per step.
    Definition("decode_steps", "decode steps", "count", "target forwards that only decoded", "neither"),
    Definition("step_s", "step", "seconds", f"{_MEAN_STEP} of wall time", "lower"),
    Definition("draft_s", "draft", "seconds", f"{_MEAN_STEP} of drafting", "lower"),
    Definition(
        "verify_s",
        "verify",
        "seconds",
        f"{_MEAN_STEP} of grammar masks, the target forward and the decision",
        "lower",
    ),
    Definition("commit_s", "commit", "seconds", f"{_MEAN_STEP} of committing tokens", "lower"),
    Definition("host_s", "host", "seconds", f"{_MEAN_STEP} of what remains of the wall time", "lower"),
    Definition(
        "harness_overhead",
        "harness overhead",
        "share",
        "1 - model forward time / wall time, summed over decode steps",
        "lower",
    ),
    Definition("mean_batch", "mean batch", "count", f"{_MEAN_STEP} of requests in the forward", "neither"),
    # Against ordinary decoding.
    Definition(
        "round_cost_ratio",
        "round cost ratio",
        "ratio",
        "mean decode step / mean ordinary decode step at the same batch and context bucket",
        "lower",
        note="A bucket is one batch size and the contexts between two powers of two, weighted by this "
        "strategy's steps. Where ordinary decoding never ran a bucket, the nearest one of that batch stands "
        "in, or else the mean of all ordinary steps.",
    ),
    Definition(
        "break_even_tokens_per_step",
        "break-even tokens per step",
        "tokens",
        "round cost ratio",
        "lower",
        note="Speculation wins where tokens per target step exceed it.",
    ),
    Definition("headroom", "headroom", "share", "tokens per target step / break-even - 1", "higher"),
    Definition(
        "decode_speedup",
        "decode speedup",
        "ratio",
        "ordinary TPOT / strategy TPOT, paired by prompt and repeat",
        "higher",
        note="Geometric mean over prompts, bootstrap interval over prompts.",
    ),
    Definition(
        "e2e_speedup",
        "E2E speedup",
        "ratio",
        "ordinary / strategy end-to-end latency per output token, paired by prompt and repeat",
        "higher",
        note="What short outputs feel: their headline.",
    ),
    Definition(
        "throughput_ratio",
        "throughput ratio",
        "ratio",
        "strategy / ordinary output throughput at the same load",
        "higher",
        note="Geometric mean of the ratios per repeat; the interval is their lowest and highest.",
    ),
    Definition(
        "predicted_speedup",
        "predicted speedup",
        "ratio",
        "tokens per target step / (1 + draft seconds per decode step / ordinary decode step)",
        "higher",
        note="What verification as cheap as an ordinary step would give; a measured speedup far below it "
        "points at the cost of verifying and at overhead. Every step counts, also those without a draft. "
        "Where verifying does cost what an ordinary step does, it is tokens per target step / break-even.",
        elsewhere={
            "Leviathan et al.": "(1 - alpha^(k+1)) / ((1 - alpha)(k c + 1)), their gamma being k: this one "
            "where every step drafts k tokens and each is accepted independently with probability alpha"
        },
    ),
    Definition(
        "draft_cost_ratio",
        "draft cost ratio",
        "ratio",
        "draft seconds per drafted position / ordinary decode step",
        "lower",
        note="The rows of a step draft together: a step has as many positions as its deepest draft.",
        elsewhere={"Leviathan et al.": "c"},
    ),
    Definition(
        "k_switches",
        "k switches",
        "per 100 steps",
        "decode steps whose deepest draft differs from that of the decode step before, per 100",
        "neither",
    ),
    Definition(
        "graph_misses",
        "graph misses",
        "per 100 steps",
        "decode steps that replayed no graph, per 100",
        "lower",
        note="Defined only where some graph was captured or replayed.",
    ),
    # What a client sees.
    Definition(
        "ttft",
        "TTFT",
        "seconds",
        "first chunk that holds a token - arrival",
        "lower",
        note="Includes queueing and draft prefill. Latencies are of completed requests.",
    ),
    Definition(
        "itl",
        "ITL",
        "seconds",
        "gap between consecutive chunks that hold tokens, pooled over requests",
        "lower",
        note="Read it beside tokens per chunk: one chunk may hold several tokens.",
        elsewhere={
            "vLLM": "ITL",
            "AIPerf": "ICL; its ITL is TPOT here",
            "GuideLLM": "its ITL is TPOT here",
            "SGLang": "its client divides each gap by the tokens of the chunk",
        },
    ),
    Definition(
        "tokens_per_chunk", "tokens per chunk", "tokens", "output tokens / chunks that hold tokens", "neither"
    ),
    Definition(
        "tpot",
        "TPOT",
        "seconds",
        "(last chunk - first chunk) / (output tokens - tokens of the first chunk)",
        "lower",
        note="One value per request, none for an output of a single chunk.",
        elsewhere={
            "vLLM": "TPOT, the first token left out",
            "AIPerf": "ITL",
            "GuideLLM": "ITL; its TPOT does not leave the first token out",
        },
    ),
    Definition("e2e", "E2E", "seconds", "last chunk that holds a token - arrival", "lower"),
    Definition(
        "output_throughput",
        "output throughput",
        "tokens/s",
        "output tokens / (last finish - first arrival)",
        "higher",
        note="Both sums over the servings of the cell; tokens of failed requests count.",
    ),
    Definition(
        "goodput",
        "goodput",
        "requests/s",
        "completed requests that meet the TTFT and TPOT limits / (last finish - first arrival)",
        "higher",
    ),
    # Memory and dispatch.
    Definition("draft_weights", "draft weights", "bytes", "bytes of the draft's weights", "lower"),
    Definition("draft_kv", "draft KV", "bytes", "peak slots held by the draft x its bytes per slot", "lower"),
    Definition(
        "lookahead_kv",
        "target lookahead KV",
        "bytes",
        "peak slots reserved for proposals x the target's bytes per slot",
        "lower",
        note="Counts the nodes of a tree, not the length of its paths.",
    ),
    Definition(
        "target_kv",
        "target KV",
        "bytes",
        "peak slots held by committed tokens x the target's bytes per slot",
        "neither",
    ),
    Definition(
        "concurrency_lost",
        "concurrency lost",
        "count",
        "sequences that fit in a KV budget without the draft - those that fit with it",
        "lower",
        note="The draft takes its weights, its own KV and the lookahead slots.",
    ),
    Definition(
        "peak_memory",
        "peak memory",
        "bytes",
        "the allocator's peak on CUDA (graphs apart), peak resident memory on a CPU",
        "lower",
    ),
    Definition(
        "dispatch",
        "dispatch",
        "count",
        "target forwards of any phase, by how their kernels were started",
        "neither",
        note="eager: one by one; compiled: compiled code, no graph; graph: a recorded CUDA graph was "
        "replayed; capture: it was being recorded. Shown as shares, and left out of tables in which "
        "every step was eager.",
    ),
)

DEFINITIONS: Mapping[str, Definition] = {definition.key: definition for definition in _TABLE}
"""Every metric by its key, in the order in which they are listed to users."""


def find(name: str) -> Definition:
    """Return a metric by its key or printed label, however it is capitalised or hyphenated.

    The beginning of one is enough where only one metric begins so: `break-even`.

    Raises:
        UsageError: If there is none; it suggests the nearest.
    """
    names = {_folded(word): one for one in _TABLE for word in (one.label, one.key)}
    if definition := names.get(_folded(name)):
        return definition
    beginning = {one.key: one for word, one in names.items() if word.startswith(_folded(name))}
    if len(beginning) == 1:
        return next(iter(beginning.values()))
    near = did_you_mean(_folded(name), [_folded(key) for key in DEFINITIONS])
    raise UsageError(f"no metric '{name}'{near}", hint=f"metrics: {', '.join(DEFINITIONS)}")


def _folded(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")
