"""How a cell's records become its one summary: which formula fills which field."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from specbench.economics import break_even, capacity
from specbench.metrics import acceptance, latency, steps
from specbench.metrics.summary import CellSummary, Estimate
from specbench.records import CellRecords, MemoryRecord, RequestRecord, Serving, StepRecord

BASELINE = "ordinary"
"""The strategy that every other one is measured against."""


def summarise(
    cell: CellRecords,
    baseline: CellRecords | None,
    *,
    service_level: latency.ServiceLevel | None = None,
    kv_budget_bytes: int | None = None,
    sequence_tokens: int | None = None,
) -> CellSummary:
    """Derive every figure of METRICS.md that the records of a cell support.

    Args:
        cell: The cell to summarise. Check its identities first: contradictory records give figures too.
        baseline: Ordinary decoding at the same workload, temperature and load, in the same run.
        service_level: The limits behind `goodput`; without them it is None.
        kv_budget_bytes: KV memory of the server to plan for; with `sequence_tokens` it gives
            `concurrency_lost`.
        sequence_tokens: Tokens of a typical sequence there.

    Raises:
        ValueError: If the baseline is of another workload, temperature or load.
    """
    _require_same_conditions(cell, baseline)
    requests = [request for serving in cell.servings for request in serving.requests]
    completed = [request for request in requests if latency.is_completed(request)]
    by_request = acceptance.decode_rounds_by_request(cell)
    per_request = partial(acceptance.mean_over_requests, by_request)
    rounds = [row for rows in by_request for row in rows]
    counts = acceptance.count_rounds(rounds)
    tokens_per_step = acceptance.tokens_per_target_step(counts)
    decode = steps.decode_steps(cell.servings)
    ordinary = steps.OrdinaryStepCost(steps.decode_steps(baseline.servings if baseline else ()))
    cost_ratio = steps.round_cost_ratio(decode, ordinary)
    modelled_cost = steps.modelled_cost_ratio(cell.servings, ordinary)
    memory = cell.memory

    return CellSummary(
        key=cell.key,
        is_baseline=cell.key.strategy == BASELINE,
        requests=len(requests),
        failures=sum(request.finish_reason == "error" for request in requests),
        output_tokens=sum(len(request.output_tokens) for request in requests),
        decode_rounds=counts.decode_rounds,
        draft_rounds=counts.draft_rounds,
        drafted=counts.drafted,
        accepted=counts.accepted,
        tested=counts.tested,
        emitted=counts.emitted,
        tokens_per_target_step=tokens_per_step,
        tokens_per_target_step_per_request=per_request(acceptance.tokens_per_target_step),
        acceptance_length=acceptance.acceptance_length(counts),
        acceptance_length_per_request=per_request(acceptance.acceptance_length),
        draft_acceptance_rate=acceptance.draft_acceptance_rate(counts),
        draft_acceptance_rate_per_request=per_request(acceptance.draft_acceptance_rate),
        alpha=acceptance.alpha(counts),
        alpha_per_request=per_request(acceptance.alpha),
        wasted_draft_share=acceptance.wasted_draft_share(counts),
        wasted_draft_share_per_request=per_request(acceptance.wasted_draft_share),
        joint_acceptance=acceptance.joint_acceptance(rounds),
        joint_acceptance_per_request=acceptance.joint_acceptance_per_request(by_request),
        conditional_acceptance=acceptance.conditional_acceptance(rounds),
        conditional_acceptance_per_request=acceptance.conditional_acceptance_per_request(by_request),
        decode_steps=len(decode),
        step_s=steps.mean_measured(decode, lambda step: step.wall_s),
        draft_s=steps.mean_measured(decode, lambda step: step.draft_s),
        verify_s=steps.mean_measured(decode, lambda step: step.verify_s),
        commit_s=steps.mean_measured(decode, lambda step: step.commit_s),
        host_s=steps.mean_measured(decode, lambda step: step.host_s),
        harness_overhead=steps.harness_overhead(decode),
        mean_batch=steps.mean_measured(decode, lambda step: step.batch),
        round_cost_ratio=cost_ratio,
        break_even_tokens_per_step=cost_ratio,
        headroom=break_even.headroom(tokens_per_step, cost_ratio) if tokens_per_step and cost_ratio else None,
        decode_speedup=_paired_speedup(cell, baseline, latency.time_per_output_token),
        e2e_speedup=_paired_speedup(cell, baseline, latency.end_to_end_per_token),
        throughput_ratio=_throughput_ratio(cell, baseline),
        predicted_speedup=(
            break_even.speedup_from_steps(tokens_per_step, modelled_cost)
            if tokens_per_step and modelled_cost
            else None
        ),
        mean_draft_depth=acceptance.mean_draft_depth(counts),
        draft_cost_ratio=steps.draft_cost_ratio(cell.servings, ordinary),
        ttft=latency.distribution(map(latency.time_to_first_token, completed)),
        itl=latency.distribution(
            gap for request in completed for gap in latency.inter_token_latencies(request)
        ),
        tokens_per_chunk=latency.tokens_per_chunk(completed),
        tpot=latency.distribution(map(latency.time_per_output_token, completed)),
        e2e=latency.distribution(map(latency.end_to_end, completed)),
        output_throughput=latency.output_throughput(cell.servings),
        goodput=latency.goodput(cell.servings, service_level) if service_level else None,
        draft_weights=memory.draft_weights,
        draft_kv=_peak_kv(cell, lambda step: step.kv_draft, memory.draft_kv_per_token),
        lookahead_kv=_peak_kv(cell, lambda step: step.kv_lookahead, memory.target_kv_per_token),
        target_kv=_peak_kv(cell, lambda step: step.kv_committed, memory.target_kv_per_token),
        concurrency_lost=_concurrency_lost(memory, kv_budget_bytes, sequence_tokens),
        peak_memory=memory.peak_bytes,
        dispatch=steps.dispatch_counts(cell.servings),
        finish_reasons=dict(Counter(request.finish_reason for request in requests)),
        k_switches=steps.k_switches(cell.servings),
        graph_misses=steps.graph_misses(decode),
    )


def _require_same_conditions(cell: CellRecords, baseline: CellRecords | None) -> None:
    if baseline is None:
        return
    ours, theirs = asdict(cell.key), asdict(baseline.key)
    if any(ours[name] != theirs[name] for name in ("workload", "temperature", "load")):
        raise ValueError(f"'{baseline.key}' is no baseline of '{cell.key}': only the strategy may differ")


def _paired_speedup(
    cell: CellRecords, baseline: CellRecords | None, measure: Callable[[RequestRecord], float | None]
) -> Estimate | None:
    """Pair both sides by prompt and repeat, leave out what either side lacks, and estimate the speedup."""
    from specbench import stats  # here, because it loads numpy, and most readers of a summary need none

    if baseline is None:
        return None
    ours, theirs = _by_prompt_and_repeat(cell, measure), _by_prompt_and_repeat(baseline, measure)
    both = sorted(ours.keys() & theirs.keys())
    ordinary, candidate = defaultdict(list), defaultdict(list)
    for prompt, repeat in both:
        ordinary[prompt].append(theirs[prompt, repeat])
        candidate[prompt].append(ours[prompt, repeat])
    interval = stats.paired_speedup(ordinary, candidate)
    return Estimate(interval.value, interval.low, interval.high, interval.num) if interval else None


def _by_prompt_and_repeat(
    cell: CellRecords, measure: Callable[[RequestRecord], float | None]
) -> dict[tuple[str, int], float]:
    """Return a time per (prompt, repeat), the mean where several requests share the prompt."""
    times = defaultdict(list)
    for serving in cell.servings:
        for request in filter(latency.is_completed, serving.requests):
            seconds = measure(request)
            if seconds is not None and seconds > 0:  # a clock too coarse to see it measured nothing
                times[request.prompt_id, serving.repeat].append(seconds)
    return {key: sum(values) / len(values) for key, values in times.items()}


def _throughput_ratio(cell: CellRecords, baseline: CellRecords | None) -> Estimate | None:
    """Return the geometric mean of the ratios per repeat; the interval is their range, if there are two."""
    from specbench import stats

    ours, theirs = _throughput_by_repeat(cell), _throughput_by_repeat(baseline)
    ratios = [ours[repeat] / theirs[repeat] for repeat in sorted(ours.keys() & theirs.keys())]
    if not ratios:
        return None
    several = len(ratios) > 1
    return Estimate(
        value=stats.geometric_mean(ratios),
        low=min(ratios) if several else None,
        high=max(ratios) if several else None,
        num=len(ratios),
    )


def _throughput_by_repeat(cell: CellRecords | None) -> dict[int, float]:
    repeats: dict[int, list[Serving]] = defaultdict(list)
    for serving in cell.servings if cell else ():
        repeats[serving.repeat].append(serving)
    measured = {repeat: latency.output_throughput(servings) for repeat, servings in repeats.items()}
    return {repeat: value for repeat, value in measured.items() if value}


def _peak_kv(cell: CellRecords, slots: Callable[[StepRecord], int], per_token: int | None) -> int | None:
    peak = max((slots(step) for serving in cell.servings for step in serving.steps), default=None)
    return None if peak is None or per_token is None else peak * per_token


def _concurrency_lost(
    memory: MemoryRecord, kv_budget_bytes: int | None, sequence_tokens: int | None
) -> int | None:
    if (
        kv_budget_bytes is None
        or sequence_tokens is None
        or memory.target_kv_per_token is None
        or memory.draft_weights is None
        or memory.draft_kv_per_token is None
        or memory.lookahead_tokens is None
    ):
        return None
    return capacity.sequences_lost(
        kv_budget_bytes,
        sequence_tokens,
        memory.target_kv_per_token,
        draft_weights=memory.draft_weights,
        draft_kv_per_token=memory.draft_kv_per_token,
        lookahead_tokens=memory.lookahead_tokens,
    )
