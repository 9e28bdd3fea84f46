"""The identities hold for every possible run, and each one notices what breaks it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.economics import break_even
from specbench.errors import IdentityViolation
from specbench.metrics import acceptance, identities, latency, summarise
from specbench.records import (
    CellKey,
    CellRecords,
    RequestRecord,
    RoundRecord,
    SamplingParams,
    Serving,
    StepRecord,
)

KEY = CellKey("toy", 1.0, "c=2", "draft:k=3")

Edit = Callable[[Serving], Serving]


@dataclasses.dataclass(frozen=True)
class Draft:
    """What one decode round of a history offered and kept."""

    depth: int
    extra_nodes: int
    accepted: int
    dropped: int = 0


def serve(histories: list[list[Draft]], ends: list[str]) -> Serving:
    """Play histories as one batch: one prefill for all, then each request's rounds until it is done."""
    rounds, moments = [], [1.0]
    for step in range(1, max(map(len, histories)) + 1):
        moments.append(moments[-1] + 0.5)
        for number, history in enumerate(histories):
            if step <= len(history):
                draft = history[step - 1]
                rounds.append(
                    RoundRecord(
                        step=step,
                        request=number,
                        round=step,
                        drafted=draft.depth + draft.extra_nodes,
                        draft_depth=draft.depth,
                        accepted=draft.accepted,
                        rejected=draft.accepted < draft.depth,
                        emitted=draft.accepted + 1 - draft.dropped,
                        ended_by="none" if step < len(history) else ends[number],  # type: ignore[arg-type]
                    )
                )
    prefills = [
        RoundRecord(0, number, 0, 0, 0, 0, False, 1, "none" if history else ends[number])  # type: ignore[arg-type]
        for number, history in enumerate(histories)
    ]
    rounds = prefills + rounds
    steps = [
        StepRecord(
            step=step,
            batch=sum(row.step == step for row in rounds),
            tokens_in=1,
            tokens_padded=0,
            context_max=step + 1,
            phase="decode" if step else "prefill",
            started=moment - 0.5,
            wall_s=0.5,
            draft_s=0.1,
            verify_s=0.3,
            commit_s=None,
            host_s=0.1,
            forward_s=0.4,
            dispatch="eager",
            kv_committed=0,
            kv_lookahead=0,
            kv_draft=0,
        )
        for step, moment in enumerate(moments)
    ]
    return Serving(
        cell=KEY,
        repeat=0,
        unit=0,
        steps=tuple(steps),
        rounds=tuple(rounds),
        requests=tuple(close(number, rounds, moments) for number in range(len(histories))),
        duration_s=moments[-1],
    )


def close(number: int, rounds: list[RoundRecord], moments: list[float]) -> RequestRecord:
    """Build the record of a request from its rounds: one chunk per round."""
    mine = [row for row in rounds if row.request == number]
    sizes = tuple(row.emitted for row in mine)
    times = tuple(moments[row.step] for row in mine)
    return RequestRecord(
        request=number,
        prompt_id=f"p{number}",
        prompt_tokens=(1,),
        output_tokens=(7,) * sum(sizes),
        sampling=SamplingParams(max_new_tokens=sum(sizes)),
        arrival=0.25,
        first_scheduled=0.5,
        chunk_times=times,
        chunk_sizes=sizes,
        finished=times[-1],
        finish_reason="length",
    )


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """A decode round, perhaps without a draft, perhaps with a tree."""
    depth = draw(st.integers(0, 5))
    return Draft(depth, draw(st.integers(0, 4)) if depth else 0, draw(st.integers(0, depth)))


@st.composite
def servings(draw: st.DrawFn) -> Serving:
    """A possible serving of a few requests; the last round of each may be truncated."""
    histories = draw(st.lists(st.lists(drafts(), max_size=6), min_size=1, max_size=4))
    for history in histories:
        if history:
            dropped = draw(st.integers(0, history[-1].accepted))
            history[-1] = dataclasses.replace(history[-1], dropped=dropped)
    ends = [draw(st.sampled_from(["eos", "stop", "budget"])) for _ in histories]
    return serve(histories, ends)


def as_cell(*slices: Serving) -> CellRecords:
    """A cell of servings."""
    return CellRecords(KEY, slices)


@given(st.lists(servings(), min_size=1, max_size=2))
def test_possible_runs_pass(slices: list[Serving]) -> None:
    """Whatever was drafted, kept and cut off, consistent records violate nothing and can be summarised."""
    cell = as_cell(*slices)
    assert identities.check(cell) == []
    identities.enforce(cell)
    summarise(cell, cell)


@given(servings())
def test_acceptance_figures_agree(serving: Serving) -> None:
    """Acceptance length is 1 + the sum of joint acceptance, which never rises; shares lie between 0 and 1."""
    summary = summarise(as_cell(serving), None)
    joint = summary.joint_acceptance
    assert list(joint) == sorted(joint, reverse=True)
    assert all(0 <= share <= 1 for share, _ in summary.conditional_acceptance)
    if summary.draft_rounds:
        assert summary.acceptance_length == pytest.approx(1 + sum(joint))
        assert summary.draft_acceptance_rate is not None
        assert summary.wasted_draft_share == pytest.approx(1 - summary.draft_acceptance_rate)
    else:
        assert summary.acceptance_length is None
    if summary.tested:
        assert summary.alpha is not None
        assert 0 <= summary.alpha <= 1
    assert summary.emitted == summary.output_tokens - summary.requests
    assert summary.emitted <= summary.accepted + summary.decode_rounds


@given(servings())
def test_conditionals_multiply_to_joint_at_fixed_depth(serving: Serving) -> None:
    """Where every draft has the same depth, joint acceptance is the product of the conditional ones."""
    rounds = [row for row in serving.rounds if row.draft_depth == 3]
    product = 1.0
    for joint, (conditional, _) in zip(
        acceptance.joint_acceptance(rounds), acceptance.conditional_acceptance(rounds), strict=False
    ):
        product *= conditional
        assert joint == pytest.approx(product)


def swap(serving: Serving, kind: str, records: list[Any]) -> Serving:
    """Return a serving with other records of one kind."""
    changes: dict[str, Any] = {kind: tuple(records)}
    return dataclasses.replace(serving, **changes)


def edit(kind: str, index: int, **changes: Any) -> Edit:
    """An edit that changes fields of one record; a callable value is applied to the field's old value."""

    def apply(serving: Serving) -> Serving:
        records = list(getattr(serving, kind))
        record = records[index]
        values = {
            name: value(getattr(record, name)) if callable(value) else value
            for name, value in changes.items()
        }
        records[index] = dataclasses.replace(record, **values)
        return swap(serving, kind, records)

    return apply


def drop(kind: str, index: int) -> Edit:
    """An edit that loses one record."""

    def apply(serving: Serving) -> Serving:
        records = list(getattr(serving, kind))
        del records[index]
        return swap(serving, kind, records)

    return apply


def double(kind: str) -> Edit:
    """An edit that stores the first record twice."""

    def apply(serving: Serving) -> Serving:
        records = getattr(serving, kind)
        return swap(serving, kind, [records[0], *records])

    return apply


def plus(amount: float) -> Callable[[Any], Any]:
    """Return the addition of an amount."""
    return lambda value: value + amount


ALWAYS_WRONG: dict[str, Edit] = {
    "an output token that no round emitted": edit("requests", 0, output_tokens=lambda tokens: (*tokens, 9)),
    "an output token lost": edit("requests", 0, output_tokens=lambda tokens: tokens[1:]),
    "a chunk with a token too many": edit(
        "requests", 0, chunk_sizes=lambda sizes: (sizes[0] + 1, *sizes[1:])
    ),
    "a chunk time too many": edit("requests", 0, chunk_times=lambda times: (*times, times[-1])),
    "a budget below the output": edit("requests", 0, sampling=SamplingParams(max_new_tokens=0)),
    "arrival after the first chunk": edit("requests", 0, arrival=1.5),
    "finish before the last chunk": edit("requests", 0, finished=0.75),
    "a request renumbered": edit("requests", 0, request=99),
    "a request lost": drop("requests", 0),
    "a request stored twice": double("requests"),
    "more emitted than accepted and one": edit("rounds", -1, emitted=plus(9)),
    "a negative number of emitted tokens": edit("rounds", -1, emitted=-1),
    "more accepted than the depth": edit("rounds", -1, accepted=9),
    "fewer accepted than none": edit("rounds", -1, accepted=-1),
    "a deeper draft than it has tokens": edit("rounds", -1, draft_depth=99),
    "a prefill that drafted": edit("rounds", 0, drafted=2, draft_depth=2),
    "a prefill that emitted two": edit("rounds", 0, emitted=2),
    "a rejection without a draft": edit("rounds", 0, rejected=True),
    "a round in no step": edit("rounds", -1, step=99),
    "a round renumbered": edit("rounds", -1, round=plus(1)),
    "a round of nobody": edit("rounds", -1, request=99),
    "a round lost": drop("rounds", 0),
    "a round stored twice": double("rounds"),
    "a batch too large": edit("steps", -1, batch=plus(1)),
    "a step renumbered": edit("steps", -1, step=99),
    "a step lost": drop("steps", -1),
    "a step stored twice": double("steps"),
    "a prefill called a decode step": edit("steps", 0, phase="decode"),
    "parts longer than the step": edit("steps", -1, verify_s=0.45),
    "model time longer than the step": edit("steps", -1, forward_s=0.6),
    "a negative time": edit("steps", -1, host_s=-0.2),
}


@pytest.mark.parametrize("name", ALWAYS_WRONG)
@settings(max_examples=15)
@given(serving=servings())
def test_one_wrong_field_is_noticed(name: str, serving: Serving) -> None:
    """Changing one field of any possible run in a way that makes it impossible is reported."""
    assert identities.check(as_cell(ALWAYS_WRONG[name](serving))) != []


WORKED = serve(
    [[Draft(3, 0, 3), Draft(3, 0, 1), Draft(3, 0, 3, dropped=2)], [Draft(0, 0, 0), Draft(3, 4, 2)]],
    ["budget", "eos"],
)
"""Rounds: 0, 1 the prefills; 2, 4, 6 decode request 0; 3, 5 decode request 1."""

# Each identity: what breaks it in the worked run, and the sentence that must come of it.
VIOLATIONS: list[tuple[str, Edit, str]] = [
    (
        "identity 1",
        edit("requests", 0, output_tokens=lambda tokens: (*tokens, 9)),
        "request 0: its decode rounds emitted 8 tokens, but the output has 10 and round 0 emitted 1",
    ),
    (
        "identity 1, in total",
        edit("requests", 0, output_tokens=lambda tokens: (*tokens, 9)),
        "the cell's decode rounds emitted 12 tokens, but its output has 15 and its rounds 0 emitted 2",
    ),
    (
        "identity 2, nothing ended",
        edit("rounds", 4, emitted=1),
        "request 0: round 2 emitted 1 tokens and ended nothing; expected 2",
    ),
    (
        "identity 2, always",
        edit("rounds", 6, emitted=5),
        "request 0: round 3 emitted 5 tokens; expected 0 to 4 with 3 accepted",
    ),
    (
        "identity 3, too many",
        edit("rounds", 2, accepted=4),
        "request 0: round 1 accepted 4 tokens of a draft of depth 3",
    ),
    (
        "identity 3, a full acceptance with a rejection",
        edit("rounds", 2, rejected=True),
        "request 0: round 1 rejected a token, but accepted the whole depth of 3",
    ),
    (
        "identity 3, depth without tokens",
        edit("rounds", 3, draft_depth=1),
        "request 1: round 1 has a draft of depth 1 in 0 tokens",
    ),
    (
        "identity 3, in total",
        edit("rounds", 2, accepted=-9, emitted=-8),
        "the cell's acceptance length is 0.25; expected 1 to 4",
    ),
    (
        "identity 3, the rate",
        edit("rounds", 2, drafted=-9),
        "the cell's draft acceptance rate is 2.25; expected 0 to 1",
    ),
    (
        "identity 4",
        edit("rounds", 2, accepted=4),
        "the cell's acceptance length is 3.5, but 1 + the sum of joint acceptance is 3.25",
    ),
    (
        "identity 5, time runs forward",
        edit("requests", 0, chunk_times=lambda times: (times[0], times[2], times[1], times[3])),
        "request 0: chunk 2 at 1.5 s is before chunk 1 at 2 s",
    ),
    (
        "identity 5, arrival",
        edit("requests", 1, arrival=0.75),
        "request 1: first scheduled at 0.5 s is before arrival at 0.75 s",
    ),
    (
        "rounds without gaps",
        edit("rounds", 6, round=4),
        "request 0: its rounds are numbered [0, 1, 2, 4]; expected 0 to 3 without gaps",
    ),
    (
        "rounds in order",
        edit("rounds", 4, step=1),
        "request 0: round 2 is in step 1; expected one after step 1",
    ),
    (
        "nothing after the end",
        edit("rounds", 4, ended_by="eos"),
        "request 0: round 3 follows round 2, which ended it by eos",
    ),
    (
        "chunks hold the output",
        edit("requests", 1, chunk_sizes=(1, 1, 2)),
        "request 1: its chunks hold 4 tokens, its output 5",
    ),
    (
        "requests exist",
        edit("rounds", 3, request=9),
        "request 9 has rounds but no record",
    ),
    (
        "within budget",
        edit("requests", 1, sampling=SamplingParams(max_new_tokens=4)),
        "request 1: has 5 output tokens, more than its budget of 4",
    ),
    (
        "chunks hold something",
        edit("requests", 1, chunk_sizes=(1, 5, -1)),
        "request 1: has a chunk with a negative number of tokens",
    ),
    (
        "phase",
        edit("steps", 0, phase="decode"),
        "step 0: phase is decode, but it holds the prefill (round 0) of a request",
    ),
    (
        "nothing is drafted in a prefill",
        edit("rounds", 0, drafted=1, draft_depth=1),
        "request 0: round 0 is the prefill, but drafted 1 tokens",
    ),
    ("steps exist", drop("steps", 2), "step 2 has rounds but no record"),
    ("batch", edit("steps", 1, batch=3), "step 1: batch is 3, but it has 2 rounds"),
    (
        "wall time",
        edit("steps", 1, wall_s=0.4),
        "step 1: draft + verify + host take 0.5 s, more than wall_s 0.4",
    ),
    (
        "no budget",
        edit("requests", 1, sampling=SamplingParams(max_new_tokens=0)),
        "request 1: has 3 rounds, but a budget of 0",
    ),
]


@pytest.mark.parametrize(
    ("change", "sentence"), [case[1:] for case in VIOLATIONS], ids=[c[0] for c in VIOLATIONS]
)
def test_each_identity_names_its_violation(change: Edit, sentence: str) -> None:
    """The worked run passes; with one change it fails, in a sentence that names the request or step."""
    assert identities.check(as_cell(WORKED)) == []
    found = identities.check(as_cell(change(WORKED)))
    assert any(violation.endswith(sentence) for violation in found), found


def test_violations_name_their_serving() -> None:
    """A violation says in which repeat and unit it was found."""
    bad = dataclasses.replace(drop("steps", 2)(WORKED), repeat=3, unit=1)
    assert "repeat 3 unit 1 step 2 has rounds but no record" in identities.check(as_cell(WORKED, bad))


def test_enforce_raises() -> None:
    """Contradictory records stop the run with an error that counts what it does not list."""
    with pytest.raises(
        IdentityViolation, match=r"'toy T=1 c=2 draft:k=3' contradict themselves.*and \d+ more"
    ):
        identities.enforce(as_cell(drop("rounds", 0)(WORKED)))


def test_totals_only_is_no_violation() -> None:
    """An engine that reports neither steps nor rounds is checked on its requests alone."""
    totals = dataclasses.replace(WORKED, steps=(), rounds=())
    assert identities.check(as_cell(totals, WORKED)) == []
    assert identities.check(as_cell(edit("requests", 0, finished=0.0)(totals))) != []


def test_budget_of_zero() -> None:
    """A request with a budget of 0 has no rounds and no output, and that is consistent."""
    nothing = RequestRecord(
        request=2,
        prompt_id="p2",
        prompt_tokens=(1,),
        output_tokens=(),
        sampling=SamplingParams(max_new_tokens=0),
        arrival=0.0,
        first_scheduled=None,
        chunk_times=(),
        chunk_sizes=(),
        finished=0.0,
        finish_reason="length",
    )
    more = dataclasses.replace(WORKED, requests=(*WORKED.requests, nothing))
    assert identities.check(as_cell(more)) == []


def test_clocks_may_disagree_a_little() -> None:
    """Parts timed by a device may exceed the host's wall time by a hundredth, not by more."""
    assert identities.check(as_cell(edit("steps", 1, verify_s=0.304)(WORKED))) == []
    assert identities.check(as_cell(edit("steps", 1, verify_s=0.306)(WORKED))) != []


def test_latencies_must_add_up() -> None:
    """Identity 5 notices reported latencies that do not sum to the end-to-end latency."""
    assert list(identities.latency_violations(0.1, [0.2, 0.3], 0.6)) == []
    assert list(identities.latency_violations(0.1, [0.2, 0.3], 0.7)) == [
        "TTFT + ITL is 0.6 s, but the last chunk came 0.7 s after arrival"
    ]


def test_latencies_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """If ITL were each gap divided by its tokens, as some clients have it, identity 5 would say so."""
    gaps = latency.inter_token_latencies
    monkeypatch.setattr(latency, "inter_token_latencies", lambda request: [gap / 2 for gap in gaps(request)])
    assert identities.check(as_cell(WORKED)) == [
        "repeat 0 unit 0 request 0: TTFT + ITL is 1.5 s, but the last chunk came 2.25 s after arrival",
        "repeat 0 unit 0 request 1: TTFT + ITL is 1.25 s, but the last chunk came 1.75 s after arrival",
    ]


def test_joint_acceptance_must_not_rise() -> None:
    """Identity 4 notices a position accepted more often than the one before it."""
    assert list(identities.joint_violations((0.7, 0.5), 2.2)) == []
    assert list(identities.joint_violations((0.5, 0.7), 2.2)) == [
        "joint acceptance rises from 0.5 to 0.7 at position 2"
    ]


# vllm-project/vllm tests/v1/spec_decode/test_acceptance_length.py (MT-Bench, greedy, k = 3): acceptance
# length, acceptance per position, and what the first position alone would predict.
VLLM_BASELINES = {
    "Llama-3.1-8B-Instruct EAGLE3": (2.60, (0.7296, 0.5208, 0.3545), 2.650),
    "Qwen3-8B EAGLE3": (2.26, (0.6541, 0.3993, 0.2020), 2.362),
    "gpt-oss-20b EAGLE3": (2.56, (0.7165, 0.5120, 0.3337), 2.598),
    "Qwen3-VL-30B EAGLE3": (1.35, (0.2900, 0.0620, 0.0115), 1.398),
}


@pytest.mark.parametrize("model", VLLM_BASELINES)
def test_vllm_baselines(model: str) -> None:
    """The per-position rates of vLLM are joint: 1 + their sum is its acceptance length, but for noise."""
    length, joint, independent = VLLM_BASELINES[model]
    assert list(identities.joint_violations(joint, length, slack=0.014)) == []
    assert break_even.expected_tokens(joint[0], 3) == pytest.approx(independent, abs=1e-3)


# SemiAnalysisAI/InferenceX golden_al_distribution/*.yaml @843c625: acceptance length at k = 1 to 8. Each k
# was a run of its own, so the differences, which estimate joint acceptance, rise where noise exceeds them.
GOLDEN = {
    "glm5.2_mtp thinking_on": ((1.84, 2.50, 2.99, 3.33, 3.61, 3.78, 3.91, 4.06), [8]),
    "kimik2.5_eagle3 thinking_on": ((1.83, 2.43, 2.88, 3.24, 3.46, 3.62, 3.71, 3.77), []),
    "kimik2.5_eagle3 thinking_off": ((1.80, 2.33, 2.75, 3.06, 3.25, 3.43, 3.46, 3.51), [8]),
    "kimik3_dspark thinking_on": ((1.84, 2.45, 2.87, 3.22, 3.44, 3.54, 3.78, 3.88), [7]),
    "minimaxm3_eagle3 thinking_on": ((1.78, 2.38, 2.83, 3.11, 3.35, 3.45, 3.53, 3.74), [8]),
    "qwen3.5_mtp thinking_on": ((1.93, 2.73, 3.39, 3.97, 4.41, 4.80, 5.04, 5.21), []),
}


@pytest.mark.parametrize("run", GOLDEN)
def test_lengths_over_k_are_joint_acceptance(run: str) -> None:
    """Acceptance lengths at k and k - 1 differ by joint acceptance, which noise makes rise in some runs."""
    lengths, rises = GOLDEN[run]
    joint = [after - before for before, after in zip((1.0, *lengths), lengths, strict=False)]
    found = list(identities.joint_violations(joint, lengths[-1]))
    assert [int(violation.rsplit(" ", 1)[1]) for violation in found] == rises
