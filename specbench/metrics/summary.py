"""The one summary of a cell: every derived figure of METRICS.md under the name it is printed with.

`None` means not measured or not defined here (no draft, one chunk, no baseline), never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specbench.records import CellKey


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its interval; `num` is the number of units (prompts) behind it."""

    value: float
    low: float | None
    high: float | None
    num: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of times in seconds."""

    mean: float
    p50: float
    p95: float
    num: int


@dataclass(frozen=True, slots=True)
class CellSummary:
    """What one strategy did on one workload, temperature and load. Times in seconds, memory in bytes."""

    key: CellKey
    is_baseline: bool
    requests: int
    failures: int
    output_tokens: int

    # Raw counts over decode rounds (round 0 left out).
    decode_rounds: int
    draft_rounds: int
    drafted: int
    accepted: int
    tested: int
    emitted: int

    # Acceptance; pooled unless the name says otherwise.
    tokens_per_target_step: float | None
    tokens_per_target_step_per_request: float | None
    acceptance_length: float | None
    draft_acceptance_rate: float | None
    draft_acceptance_rate_per_request: float | None
    alpha: float | None
    wasted_draft_share: float | None
    joint_acceptance: tuple[float, ...]
    conditional_acceptance: tuple[tuple[float, int], ...]

    # Time per decode step (phase "decode" only; a mixed or prefill step is not one).
    decode_steps: int
    step_s: float | None
    draft_s: float | None
    verify_s: float | None
    commit_s: float | None
    host_s: float | None
    harness_overhead: float | None
    mean_batch: float | None

    # Against ordinary decoding in the same run.
    round_cost_ratio: float | None
    break_even_tokens_per_step: float | None
    headroom: float | None
    decode_speedup: Estimate | None
    e2e_speedup: Estimate | None
    throughput_ratio: Estimate | None
    predicted_speedup: float | None

    # What a client sees.
    ttft: Distribution | None
    itl: Distribution | None
    tokens_per_chunk: float | None
    tpot: Distribution | None
    e2e: Distribution | None
    output_throughput: float | None

    # Memory and dispatch.
    draft_weights: int | None
    draft_kv: int | None
    lookahead_kv: int | None
    target_kv: int | None
    concurrency_lost: int | None
    peak_memory: int | None
    dispatch: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)

    # Each acceptance ratio in its other form, the mean over requests; `conditional_` counts requests.
    acceptance_length_per_request: float | None = None
    alpha_per_request: float | None = None
    wasted_draft_share_per_request: float | None = None
    joint_acceptance_per_request: tuple[float, ...] = ()
    conditional_acceptance_per_request: tuple[tuple[float, int], ...] = ()

    # Beside alpha, the k and c of Leviathan et al.: what to put into their formula.
    mean_draft_depth: float | None = None
    draft_cost_ratio: float | None = None

    # Per 100 decode steps.
    k_switches: float | None = None
    graph_misses: float | None = None

    # Requests per second that met the service level; None without one.
    goodput: float | None = None
