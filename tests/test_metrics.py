"""Every figure of a summary, on cells small enough to work by hand."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import get_type_hints

import pytest

from specbench.economics import break_even
from specbench.errors import UsageError
from specbench.metrics import acceptance, definitions, identities, latency, steps, summarise
from specbench.metrics.summary import CellSummary, Distribution
from specbench.records import (
    CellKey,
    CellRecords,
    MemoryRecord,
    RequestRecord,
    RoundRecord,
    SamplingParams,
    Serving,
    StepRecord,
)

ORDINARY, DRAFT = "ordinary", "draft:k=2"


def step(number: int, wall_ms: float, **changes: object) -> StepRecord:
    """A decode step of batch 1 that verified the whole time."""
    record = StepRecord(
        step=number,
        batch=1,
        tokens_in=1,
        tokens_padded=0,
        context_max=10,
        phase="decode",
        started=0.0,
        wall_s=wall_ms / 1000,
        draft_s=0.0,
        verify_s=wall_ms / 1000,
        commit_s=0.0,
        host_s=0.0,
        forward_s=wall_ms / 1000,
        dispatch="eager",
        kv_committed=0,
        kv_lookahead=0,
        kv_draft=0,
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def row(number: int, drafted: int = 0, accepted: int = 0, **changes: object) -> RoundRecord:
    """A round of request 0 in the step of the same number, with a chain as its draft."""
    record = RoundRecord(
        step=number,
        request=0,
        round=number,
        drafted=drafted,
        draft_depth=drafted,
        accepted=accepted,
        rejected=accepted < drafted,
        emitted=accepted + 1,
        ended_by="none",
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def request(times_ms: list[float], sizes: list[int], **changes: object) -> RequestRecord:
    """A request that arrived at 0 and finished with its last chunk."""
    record = RequestRecord(
        request=0,
        prompt_id="p0",
        prompt_tokens=(1, 2),
        output_tokens=tuple(range(sum(sizes))),
        sampling=SamplingParams(max_new_tokens=sum(sizes)),
        arrival=0.0,
        first_scheduled=0.0,
        chunk_times=tuple(time / 1000 for time in times_ms),
        chunk_sizes=tuple(sizes),
        finished=max(times_ms, default=0.0) / 1000,
        finish_reason="length",
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def serving(
    strategy: str,
    steps_: list[StepRecord] | None = None,
    rounds: list[RoundRecord] | None = None,
    requests: list[RequestRecord] | None = None,
    repeat: int = 0,
    unit: int = 0,
) -> Serving:
    """One serving of a strategy."""
    return Serving(
        cell=CellKey("toy", 0.0, "c=1", strategy),
        repeat=repeat,
        unit=unit,
        steps=tuple(steps_ or ()),
        rounds=tuple(rounds or ()),
        requests=tuple(requests or ()),
        duration_s=1.0,
    )


def cell(*servings: Serving, memory: MemoryRecord | None = None) -> CellRecords:
    """A cell of servings of one strategy."""
    return CellRecords(servings[0].cell, servings, memory or MemoryRecord())


def ordinary_serving(repeat: int = 0, step_ms: float = 8) -> Serving:
    """Five tokens by ordinary decoding: 10 ms for the first, 8 ms for each of the others."""
    return serving(
        ORDINARY,
        [step(0, 10, phase="prefill"), *(step(number, step_ms) for number in range(1, 5))],
        [row(number) for number in range(4)] + [row(4, ended_by="budget")],
        [request([10 + step_ms * number for number in range(5)], [1] * 5)],
        repeat,
    )


def draft_serving(repeat: int = 0) -> Serving:
    """The same five tokens with k = 2: 14 ms for the first, then rounds of 3 + 9 ms that accept 2 and 0."""
    parts = {"draft_s": 0.003, "verify_s": 0.008, "commit_s": 0.0006, "host_s": 0.0004, "forward_s": 0.009}
    return serving(
        DRAFT,
        [
            step(0, 14, phase="prefill", kv_committed=2, kv_draft=2),
            step(1, 12, kv_committed=6, kv_lookahead=2, kv_draft=5, **parts),
            step(2, 12, kv_committed=7, kv_lookahead=2, kv_draft=7, **parts),
        ],
        [row(0), row(1, 2, 2), row(2, 2, 0, ended_by="budget")],
        [request([14, 26, 38], [1, 3, 1])],
        repeat,
    )


MEMORY = MemoryRecord(
    target_weights=5000,
    draft_weights=1000,
    target_kv_per_token=10,
    draft_kv_per_token=2,
    lookahead_tokens=2,
    peak_bytes=9999,
    peak_source="rss",
)


def test_ordinary_cell_by_hand() -> None:
    """Ordinary decoding gives one token per step, has no acceptance, and is marked as the baseline."""
    summary = summarise(cell(ordinary_serving()), None)
    assert summary.is_baseline
    assert (summary.requests, summary.failures, summary.output_tokens) == (1, 0, 5)
    assert (summary.decode_rounds, summary.draft_rounds, summary.emitted) == (4, 0, 4)
    assert summary.tokens_per_target_step == 1
    assert summary.acceptance_length is None
    assert summary.draft_acceptance_rate is None
    assert summary.alpha is None
    assert summary.joint_acceptance == ()
    assert summary.conditional_acceptance == ()
    assert summary.step_s == pytest.approx(0.008)
    assert summary.ttft == Distribution(0.010, 0.010, 0.010, 1)
    assert summary.tpot is not None
    assert summary.tpot.mean == pytest.approx(0.008)
    assert summary.itl is not None
    assert summary.itl.num == 4
    assert summary.itl.p95 == pytest.approx(0.008)
    assert summary.tokens_per_chunk == 1
    assert summary.output_throughput == pytest.approx(5 / 0.042)
    assert summary.round_cost_ratio is None
    assert summary.decode_speedup is None
    assert summary.throughput_ratio is None
    assert summary.finish_reasons == {"length": 1}
    assert summary.dispatch == {"eager": 5}


def test_draft_cell_by_hand() -> None:
    """Every acceptance and cost figure of a two-round cell is the one worked out on paper."""
    summary = summarise(cell(draft_serving(), memory=MEMORY), cell(ordinary_serving()))
    assert not summary.is_baseline
    assert (summary.decode_rounds, summary.draft_rounds) == (2, 2)
    assert (summary.drafted, summary.accepted, summary.tested, summary.emitted) == (4, 2, 3, 4)
    assert summary.tokens_per_target_step == 2
    assert summary.acceptance_length == 2
    assert summary.draft_acceptance_rate == 0.5
    assert summary.wasted_draft_share == 0.5
    assert summary.alpha == pytest.approx(2 / 3)
    assert summary.joint_acceptance == (0.5, 0.5)
    assert summary.conditional_acceptance == ((0.5, 2), (1.0, 1))
    assert summary.mean_draft_depth == 2

    assert summary.decode_steps == 2
    assert summary.step_s == pytest.approx(0.012)
    assert summary.draft_s == pytest.approx(0.003)
    assert summary.verify_s == pytest.approx(0.008)
    assert summary.commit_s == pytest.approx(0.0006)
    assert summary.host_s == pytest.approx(0.0004)
    assert summary.harness_overhead == pytest.approx(0.25)
    assert summary.mean_batch == 1

    assert summary.round_cost_ratio == pytest.approx(1.5)
    assert summary.break_even_tokens_per_step == summary.round_cost_ratio
    assert summary.headroom == pytest.approx(1 / 3)
    assert summary.draft_cost_ratio == pytest.approx(3 / 2 / 8)
    assert summary.predicted_speedup == pytest.approx(2 / (1 + 3 / 8))

    assert summary.ttft == Distribution(0.014, 0.014, 0.014, 1)
    assert summary.itl is not None
    assert summary.itl.num == 2
    assert summary.itl.mean == pytest.approx(0.012)
    assert summary.tokens_per_chunk == pytest.approx(5 / 3)
    assert summary.tpot is not None
    assert summary.tpot.mean == pytest.approx(0.006)
    assert summary.e2e is not None
    assert summary.e2e.mean == pytest.approx(0.038)


def test_speedups_by_hand() -> None:
    """Decode, E2E and throughput each compare what they say they compare; one of each has no interval."""
    summary = summarise(cell(draft_serving()), cell(ordinary_serving()))
    for estimate, value in (
        (summary.decode_speedup, 8 / 6),
        (summary.e2e_speedup, 42 / 38),
        (summary.throughput_ratio, 42 / 38),
    ):
        assert estimate is not None
        assert estimate.value == pytest.approx(value)
        assert (estimate.low, estimate.high, estimate.num) == (None, None, 1)


def test_memory_by_hand() -> None:
    """KV bytes are the peak slots times the bytes of one slot of whoever holds them."""
    summary = summarise(cell(draft_serving(), memory=MEMORY), None)
    assert (summary.draft_weights, summary.peak_memory) == (1000, 9999)
    assert (summary.draft_kv, summary.lookahead_kv, summary.target_kv) == (7 * 2, 2 * 10, 7 * 10)
    assert summary.concurrency_lost is None


def test_concurrency_lost() -> None:
    """A budget of 10 sequences holds 6 beside a draft's weights, its KV and two lookahead slots each."""
    summary = summarise(cell(draft_serving(), memory=MEMORY), None, kv_budget_bytes=2000, sequence_tokens=20)
    assert summary.concurrency_lost == 10 - (2000 - 1000) // (20 * 12 + 2 * 10)


def test_unknown_memory_stays_unknown() -> None:
    """Bytes that nobody measured are None, also where the slots are known."""
    summary = summarise(cell(draft_serving()), None, kv_budget_bytes=2000, sequence_tokens=20)
    assert (summary.draft_weights, summary.draft_kv, summary.lookahead_kv, summary.target_kv) == (None,) * 4
    assert summary.concurrency_lost is None


def test_repeats_are_paired() -> None:
    """The throughput ratio of two repeats is their geometric mean, its bounds the lower and the higher."""
    ours = cell(draft_serving(0), draft_serving(1))
    summary = summarise(ours, cell(ordinary_serving(0), ordinary_serving(1, step_ms=16)))
    ratio = summary.throughput_ratio
    assert ratio is not None
    assert ratio.low == pytest.approx(42 / 38)
    assert ratio.high == pytest.approx(74 / 38)
    assert ratio.value == pytest.approx((42 / 38 * 74 / 38) ** 0.5)
    assert ratio.num == 2


def test_unpaired_repeats_are_left_out() -> None:
    """A repeat that only one side has does not enter a speedup."""
    summary = summarise(
        cell(draft_serving(0), draft_serving(1)), cell(ordinary_serving(1), ordinary_serving(2, step_ms=80))
    )
    assert summary.decode_speedup is not None
    assert summary.decode_speedup.value == pytest.approx(8 / 6)
    assert summary.throughput_ratio is not None
    assert summary.throughput_ratio.num == 1


def test_baseline_must_match() -> None:
    """Ordinary decoding at another load is refused as a baseline."""
    other = cell(ordinary_serving())
    other = dataclasses.replace(other, key=dataclasses.replace(other.key, load="c=8"))
    with pytest.raises(ValueError, match="no baseline"):
        summarise(cell(draft_serving()), other)


def test_request_numbers_are_per_serving() -> None:
    """Request 0 of two servings is two requests."""
    both = cell(draft_serving(0), draft_serving(1))
    assert len(acceptance.decode_rounds_by_request(both)) == 2
    assert summarise(both, None).requests == 2


def test_steps_without_a_draft_count() -> None:
    """An n-gram that finds nothing costs a step: it lowers the headline and not the acceptance length."""
    counts = acceptance.count_rounds([row(1, 2, 2), row(2), row(3)])
    assert acceptance.tokens_per_target_step(counts) == pytest.approx(5 / 3)
    assert acceptance.acceptance_length(counts) == 3


def test_vllm_worked_example() -> None:
    """43 drafts of 3 that accept 0, 1, 2, 3 tokens 39, 1, 0, 3 times give the figures of vLLM's manual.

    Source: vllm-project/vllm docs/features/speculative_decoding/acceptance_metrics.md.
    """
    histogram = [39, 1, 0, 3]
    rounds = [row(1, 3, accepted) for accepted, times in enumerate(histogram) for _ in range(times)]
    counts = acceptance.count_rounds(rounds)
    assert (counts.decode_rounds, counts.accepted, counts.drafted) == (43, 10, 129)
    assert acceptance.acceptance_length(counts) == pytest.approx(1.2325581395)
    assert acceptance.draft_acceptance_rate(counts) == pytest.approx(0.0775, abs=5e-5)
    assert acceptance.joint_acceptance(rounds) == (4 / 43, 3 / 43, 3 / 43)
    assert acceptance.conditional_acceptance(rounds) == ((4 / 43, 43), (3 / 4, 4), (1.0, 3))
    assert acceptance.alpha(counts) == pytest.approx(10 / 50)


def test_acceptance_rate_is_over_drafted_tokens() -> None:
    """An acceptance length of 2.78 at k = 3 is a rate of .593, not the .694 some tools print for it.

    Source: NVIDIA-NeMo/Skills docs/evaluation/speculative-decoding.md.
    """
    rounds = [row(1, 3, accepted) for accepted in [3] * 39 + [2] * 20 + [1] * 21 + [0] * 20]
    counts = acceptance.count_rounds(rounds)
    assert acceptance.acceptance_length(counts) == pytest.approx(2.78)
    assert acceptance.draft_acceptance_rate(counts) == pytest.approx(0.593, abs=5e-4)


def test_varying_depth_biases_the_ratio_of_joint_rates() -> None:
    """Conditional acceptance leaves out rounds too short to test a position; the ratio of joints does not."""
    rounds = [row(1, 1, 1), row(2, 1, 1), row(3, 2, 2), row(4, 2, 0)]
    joint = acceptance.joint_acceptance(rounds)
    assert joint == (0.75, 0.25)
    assert acceptance.conditional_acceptance(rounds) == ((0.75, 4), (1.0, 1))
    assert joint[1] / joint[0] == pytest.approx(1 / 3)


def test_unreached_positions_have_no_conditional_rate() -> None:
    """A position that no round reached is absent, not 0."""
    assert acceptance.conditional_acceptance([row(1, 3, 0), row(2, 3, 1)]) == ((0.5, 2), (0.0, 1))


def test_truncated_round() -> None:
    """Acceptance counts what verification kept, tokens per step what reached the output."""
    counts = acceptance.count_rounds([row(1, 4, 4, emitted=2, ended_by="eos")])
    assert acceptance.acceptance_length(counts) == 5
    assert acceptance.tokens_per_target_step(counts) == 2
    assert acceptance.alpha(counts) == 1


def test_pooled_and_per_request_differ() -> None:
    """Pooled figures weigh requests by their rounds, per-request figures do not."""
    eager = [row(number, 2, 2) for number in range(1, 4)]
    poor = [row(1, 2, 0, request=1)]
    whole = cell(serving(DRAFT, rounds=eager + poor))
    summary = summarise(whole, None)
    assert summary.draft_acceptance_rate == 0.75
    assert summary.draft_acceptance_rate_per_request == 0.5
    assert summary.tokens_per_target_step == 10 / 4
    assert summary.tokens_per_target_step_per_request == 2
    assert summary.acceptance_length_per_request == 2
    assert summary.alpha == 6 / 7
    assert summary.alpha_per_request == 0.5
    assert summary.wasted_draft_share_per_request == 0.5
    assert summary.joint_acceptance_per_request == (0.5, 0.5)
    assert summary.conditional_acceptance_per_request == ((0.5, 2), (1.0, 1))


def test_a_tree_is_predicted_from_its_steps() -> None:
    """The prediction needs tokens per step and draft time only, so a tree has one; its depth sets k."""
    tree = draft_serving()
    rounds = tuple(dataclasses.replace(one, drafted=one.drafted * 3) for one in tree.rounds)
    summary = summarise(cell(dataclasses.replace(tree, rounds=rounds)), cell(ordinary_serving()))
    assert summary.predicted_speedup == pytest.approx(2 / (1 + 3 / 8))
    assert summary.draft_acceptance_rate == pytest.approx(2 / 12)
    assert summary.mean_draft_depth == 2
    assert summary.joint_acceptance == (0.5, 0.5)


def test_prediction_with_everything_accepted() -> None:
    """Where every step drafts k tokens and keeps them, the prediction is Leviathan's (k + 1) / (k c + 1)."""
    perfect = draft_serving()
    rounds = (row(0), row(1, 2, 2), row(2, 2, 2))
    summary = summarise(cell(dataclasses.replace(perfect, rounds=rounds)), cell(ordinary_serving()))
    assert summary.predicted_speedup == pytest.approx(3 / (2 * 3 / 16 + 1))
    assert summary.draft_cost_ratio is not None
    assert summary.predicted_speedup == pytest.approx(
        break_even.predicted_speedup(1.0, 2, summary.draft_cost_ratio)
    )


def test_prediction_where_verifying_costs_an_ordinary_step() -> None:
    """With constant step times it is tokens per step / break-even, though most steps draft nothing."""
    times = {"wall_ms": 9, "draft_s": 0.001, "verify_s": 0.008}
    records = serving(
        DRAFT,
        [step(0, 14, phase="prefill"), *(step(number, **times) for number in range(1, 5))],
        [row(0), row(1), row(2, 4, 3), row(3), row(4)],
    )
    summary = summarise(cell(records), cell(ordinary_serving()))
    assert summary.tokens_per_target_step == 7 / 4
    assert summary.break_even_tokens_per_step == pytest.approx(9 / 8)
    assert summary.predicted_speedup == pytest.approx((7 / 4) / (9 / 8))


def test_a_step_without_a_draft_may_have_no_draft_time() -> None:
    """Unknown draft time costs nothing where nothing was drafted; elsewhere it leaves the prediction out."""
    timed, untimed = step(1, 9, draft_s=0.001), step(2, 8, draft_s=None)
    ordinary = steps.OrdinaryStepCost([step(0, 8)])
    without = serving(DRAFT, [timed, untimed], [row(1, 2, 2), row(2)])
    assert steps.modelled_cost_ratio([without], ordinary) == pytest.approx(1 + 0.5 / 8)
    drafted = serving(DRAFT, [timed, untimed], [row(1, 2, 2), row(2, 2, 2)])
    assert steps.modelled_cost_ratio([drafted], ordinary) is None
    assert steps.modelled_cost_ratio([serving(DRAFT, [untimed], [row(2)])], ordinary) is None


def test_only_decode_steps_are_timed() -> None:
    """A mixed step counts towards tokens per step, not towards the cost of a step."""
    records = draft_serving()
    mixed = dataclasses.replace(records.steps[2], phase="mixed", wall_s=0.5)
    summary = summarise(cell(dataclasses.replace(records, steps=(*records.steps[:2], mixed))), None)
    assert summary.decode_steps == 1
    assert summary.step_s == pytest.approx(0.012)
    assert summary.decode_rounds == 2


def test_unmeasured_parts_are_left_out_of_means() -> None:
    """A part that was measured in one step of two has that step's mean; measured in none, it has none."""
    both = [step(1, 8, draft_s=None, forward_s=None), step(2, 8, draft_s=0.002, forward_s=None)]
    summary = summarise(cell(serving(DRAFT, both)), None)
    assert summary.draft_s == pytest.approx(0.002)
    assert summary.harness_overhead is None


def test_round_cost_matches_batch_and_context() -> None:
    """A step is compared with ordinary ones of its batch and context, weighted by where it was run."""
    ordinary = steps.OrdinaryStepCost(
        [
            *(step(number, 8, context_max=10) for number in range(9)),
            step(9, 20, context_max=1000),
            step(10, 30, batch=4, context_max=10),
        ]
    )
    ours = [step(0, 12, context_max=15), step(1, 30, context_max=513), step(2, 30, context_max=1023)]
    assert steps.round_cost_ratio(ours, ordinary) == pytest.approx(72 / 48)
    assert steps.round_cost_ratio([step(0, 60, batch=4, context_max=9)], ordinary) == pytest.approx(2)


def test_round_cost_falls_back() -> None:
    """An unseen context takes its batch's nearest (shorter on a tie), an unseen batch the mean of all."""
    ordinary = steps.OrdinaryStepCost(
        [step(0, 8, context_max=8), step(1, 16, context_max=32), step(2, 36, batch=2, context_max=8)]
    )
    assert ordinary.seconds(1, 16) == pytest.approx(0.008)
    assert ordinary.seconds(1, 5000) == pytest.approx(0.016)
    assert ordinary.seconds(2, 5000) == pytest.approx(0.036)
    assert ordinary.seconds(3, 8) == pytest.approx(0.020)
    assert steps.OrdinaryStepCost([]).seconds(1, 8) is None
    assert steps.round_cost_ratio([step(0, 8)], steps.OrdinaryStepCost([])) is None


def test_draft_cost_shares_the_batch() -> None:
    """Two rows that draft 4 and 2 tokens together cost four drafted positions, not six."""
    records = serving(
        DRAFT,
        [step(1, 20, batch=2, draft_s=0.004), step(2, 8, batch=2, draft_s=0.001)],
        [row(1, 4, 4), row(1, 2, 2, request=1), row(2), row(2, request=1)],
    )
    ordinary = steps.OrdinaryStepCost([step(0, 10, batch=2)])
    assert steps.draft_cost_ratio([records], ordinary) == pytest.approx(0.1)


def test_k_switches_and_graph_misses() -> None:
    """Of four decode steps with k 2, 2, 3, 2 two switched; one captured a graph, so one of four missed."""
    depths = [2, 2, 3, 2]
    records = serving(
        DRAFT,
        [step(number, 8, dispatch="capture" if number == 3 else "graph") for number in range(1, 5)],
        [row(number, depth, depth) for number, depth in enumerate(depths, start=1)],
    )
    summary = summarise(cell(records), None)
    assert summary.k_switches == 50
    assert summary.graph_misses == 25
    assert summarise(cell(draft_serving()), None).graph_misses is None


def test_engine_that_reports_only_totals() -> None:
    """Without steps and rounds, client-side times are there and everything else is None."""
    ours = cell(serving(DRAFT, requests=[request([14, 26, 38], [1, 3, 1])]))
    summary = summarise(ours, cell(ordinary_serving()))
    assert summary.decode_speedup is not None
    assert summary.decode_speedup.value == pytest.approx(8 / 6)
    for name in (
        "tokens_per_target_step",
        "acceptance_length",
        "step_s",
        "harness_overhead",
        "round_cost_ratio",
        "headroom",
        "predicted_speedup",
        "target_kv",
        "k_switches",
    ):
        assert getattr(summary, name) is None, name


def test_first_chunk_with_two_tokens() -> None:
    """Tokens of the first chunk are left out of TPOT, and empty chunks are no chunks."""
    one = request([5, 10, 20, 40, 50], [0, 2, 0, 3, 0])
    assert latency.time_to_first_token(one) == pytest.approx(0.010)
    assert latency.inter_token_latencies(one) == [pytest.approx(0.030)]
    assert latency.time_per_output_token(one) == pytest.approx(0.010)
    assert latency.end_to_end(one) == pytest.approx(0.040)
    assert latency.tokens_per_chunk([one]) == 2.5


def test_latencies_start_at_arrival() -> None:
    """Queueing counts: TTFT and E2E are measured from arrival, not from the start of the schedule."""
    one = request([30, 40], [1, 1], arrival=0.020, first_scheduled=0.025)
    assert latency.time_to_first_token(one) == pytest.approx(0.010)
    assert latency.end_to_end(one) == pytest.approx(0.020)
    assert latency.end_to_end_per_token(one) == pytest.approx(0.010)


def test_single_chunk_has_no_tpot() -> None:
    """An output that came in one chunk has a TTFT and no TPOT; an empty output has neither."""
    one, none = request([10], [4]), request([], [])
    assert latency.time_to_first_token(one) == pytest.approx(0.010)
    assert latency.time_per_output_token(one) is None
    assert latency.time_to_first_token(none) is None
    assert latency.end_to_end(none) is None
    assert latency.distribution([latency.time_per_output_token(one)]) is None


def test_failed_requests_count_but_are_not_timed() -> None:
    """A failed request's tokens are in the throughput; its latency is not that of a request."""
    broken = request([50, 90], [1, 1], request=1, prompt_id="p1", finish_reason="error", error="dropped")
    good = request([10, 20], [1, 1])
    summary = summarise(cell(serving(DRAFT, requests=[good, broken])), None)
    assert (summary.requests, summary.failures, summary.output_tokens) == (2, 1, 4)
    assert summary.output_throughput == pytest.approx(4 / 0.090)
    assert summary.ttft is not None
    assert summary.ttft.num == 1
    assert summary.ttft.mean == pytest.approx(0.010)
    assert summary.finish_reasons == {"length": 1, "error": 1}


def test_throughput_pools_servings() -> None:
    """A cell's throughput is its tokens over the sum of its servings' spans, each from its first arrival."""
    first = serving(DRAFT, requests=[request([10, 20], [1, 1])])
    second = serving(DRAFT, requests=[request([150, 180], [1, 5], arrival=0.100)], unit=1)
    assert latency.output_throughput([first, second]) == pytest.approx(8 / (0.020 + 0.080))
    assert latency.output_throughput([serving(DRAFT)]) is None


def test_goodput() -> None:
    """Only completed requests within both limits are good; without limits every completed one is."""
    requests = [
        request([10, 20], [1, 1]),
        request([30, 40], [1, 1], request=1),
        request([10, 100], [1, 1], request=2),
        request([10], [3], request=3),
        request([10, 20], [1, 1], request=4, finish_reason="error"),
    ]
    whole = cell(serving(DRAFT, requests=requests))
    strict = latency.ServiceLevel(ttft_s=0.020, tpot_s=0.050)
    assert summarise(whole, None, service_level=strict).goodput == pytest.approx(2 / 0.100)
    assert latency.goodput(whole.servings, latency.ServiceLevel()) == pytest.approx(4 / 0.100)
    assert summarise(whole, None).goodput is None


def test_distribution_interpolates() -> None:
    """Percentiles lie between order statistics as numpy's do."""
    four = latency.distribution([4.0, 1.0, None, 2.0, 3.0])
    assert four is not None
    assert (four.mean, four.p50, four.num) == (2.5, 2.5, 4)
    assert four.p95 == pytest.approx(3.85)


def test_hand_worked_cells_are_consistent() -> None:
    """The cells of this file satisfy the identities, so their figures are those of a possible run."""
    assert identities.check(cell(draft_serving(), draft_serving(1))) == []
    assert identities.check(cell(ordinary_serving())) == []


def test_every_figure_is_defined() -> None:
    """Each field of a summary that holds a figure has a definition, and each definition has a field."""
    hints = get_type_hints(CellSummary)
    figures = {name for name in hints if name not in ("key", "is_baseline", "finish_reasons")}
    assert set(definitions.DEFINITIONS) == figures


def test_labels_are_unique() -> None:
    """No two metrics are printed under one label, and none is an unlabelled 'acceptance rate'."""
    labels = [definition.label for definition in definitions.DEFINITIONS.values()]
    assert len(set(labels)) == len(labels)
    assert "acceptance rate" not in labels


@pytest.mark.parametrize("name", ["ttft", "TTFT", "Acceptance length", "acceptance-length", "E2E speedup"])
def test_definitions_are_found(name: str) -> None:
    """A metric is found by key or label, however it is written."""
    assert definitions.find(name).formula


def test_unknown_metric_suggests() -> None:
    """A misspelt metric is answered with the nearest."""
    with pytest.raises(UsageError, match="did you mean 'ttft'"):
        definitions.find("tttf")


def test_the_beginning_of_a_name_finds_it() -> None:
    """A metric is found by the beginning of its name where only one begins so, and not otherwise."""
    assert definitions.find("break-even").key == "break_even_tokens_per_step"
    with pytest.raises(UsageError):
        definitions.find("d")


def test_import_is_light() -> None:
    """Importing every metric and formula loads neither torch nor numpy."""
    code = (
        "import sys, specbench.metrics.identities, specbench.metrics.definitions; "
        "import specbench.economics.capacity; "
        "sys.exit(bool({'torch', 'numpy', 'scipy', 'pyarrow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
