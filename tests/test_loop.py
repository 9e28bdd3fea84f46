"""The step loop: what it emits, when it admits, when it stops, and what it records."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import (
    CONTEXT,
    FAMILIES,
    VOCAB,
    Served,
    build,
    collect,
    copied,
    greedy,
    perturbed,
    requests,
    shared,
    uncached,
)

from specbench import registry
from specbench.engines.local import LocalEngine
from specbench.errors import UsageError
from specbench.records import Request, Schedule
from specbench.runtime import loop as loop_module
from specbench.runtime.cache import SlotCache
from specbench.runtime.events import Chunk, Finished
from specbench.runtime.loop import StepLoop
from specbench.runtime.protocols import Resources
from specbench.runtime.runner import ModelRunner

PROMPTS = (
    (3, 1, 4, 1, 5, 9, 2, 6, 5, 3),
    (2,),
    (7, 7, 8, 9, 3, 7, 7, 8, 9, 3, 7, 7),
    (16, 0, 16),
    tuple((5 * i) % VOCAB for i in range(21)),
)
STRATEGIES = ("ordinary", "ngram:k=3,min=1", "draft:k=3", "early-exit:layers=2,k=3")

Slotted = Callable[[str], Any]


def engine(
    slotted: Slotted, family: str = "llama", *, eos: tuple[int, ...] = (), **options: Any
) -> LocalEngine:
    """Return an engine whose draft resembles its target."""
    target = slotted(family)
    return LocalEngine(
        target, eos_ids=eos, draft=perturbed(target, 0.1), **{"rows": 8, "width": CONTEXT, **options}
    )


def serve(opened: LocalEngine, strategy: str, offered: Any, **schedule: Any) -> Served:
    """Open a strategy and serve requests, 3 at a time unless told otherwise."""
    opened.open(strategy)
    return collect(opened.serve(Schedule(tuple(offered), **{"concurrency": 3, **schedule})))


# What is emitted


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_what_generate_emits(family: str, slotted: Slotted) -> None:
    """A ragged batch decodes greedily to exactly the tokens of transformers' `generate`, drafts or not."""
    model = copied(shared(family), "eager" if family == "gemma2" else "sdpa")
    expected = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=0,
        )
        expected.append(output[0, len(prompt) :].tolist())
    opened = engine(slotted, family)
    for strategy in STRATEGIES:
        served = serve(opened, strategy, requests(PROMPTS, temperature=0.0, max_new_tokens=20))
        assert served.outputs == expected, strategy
        assert set(served.reasons) == {"length"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_eos_ends_a_request_wherever_it_falls(strategy: str, slotted: Slotted) -> None:
    """With any token as EOS, greedy output ends with its first occurrence; ignored, it ends nothing."""
    free = [greedy(shared("llama"), prompt, 12) for prompt in PROMPTS]
    for eos in sorted({token for output in free for token in output}):
        opened = engine(slotted, eos=(eos,))
        served = serve(opened, strategy, requests(PROMPTS, temperature=0.0, max_new_tokens=12))
        for output, reason, whole in zip(served.outputs, served.reasons, free, strict=True):
            end = whole.index(eos) + 1 if eos in whole else 12
            assert output == whole[:end]
            assert reason == ("eos" if eos in whole else "length")
    served = serve(opened, strategy, requests(PROMPTS, temperature=0.0, max_new_tokens=12, ignore_eos=True))
    assert served.outputs == free


def test_stop_ids_are_the_requests_own(slotted: Slotted) -> None:
    """A stop id ends the request that named it with reason `stop`, and no other."""
    free = [greedy(shared("llama"), prompt, 12) for prompt in PROMPTS]
    stop = free[0][4]
    offered = list(requests(PROMPTS, temperature=0.0, max_new_tokens=12, ignore_eos=True))
    offered[0] = replace(offered[0], sampling=replace(offered[0].sampling, stop_token_ids=(stop,)))
    for strategy in STRATEGIES:
        served = serve(engine(slotted, eos=(stop,)), strategy, offered)
        assert served.outputs == [free[0][: free[0].index(stop) + 1], *free[1:]]
        assert served.reasons == ["stop", "length", "length", "length", "length"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 4, 5])
def test_budgets_are_met_exactly(strategy: str, budget: int, slotted: Slotted) -> None:
    """A budget of n emits n tokens, around the draft length too; no draft token is beyond the budget."""
    served = serve(
        engine(slotted), strategy, requests(PROMPTS, temperature=0.0, max_new_tokens=budget), concurrency=2
    )
    assert served.outputs == [greedy(shared("llama"), prompt, budget) for prompt in PROMPTS]
    assert set(served.reasons) == {"length"}
    if budget == 0:
        assert served.steps == ()  # not even a prefill
        assert served.records[0].chunk_times == ()
    for entry in served.rounds:
        before = sum(r.emitted for r in served.rounds if (r.request, -r.round) > (entry.request, -entry.round)
                     and r.request == entry.request)  # fmt: skip
        assert before + entry.drafted + 1 <= budget


def test_a_budget_of_nothing_beside_others(slotted: Slotted) -> None:
    """A request without a budget finishes at once, while the others decode as they would without it."""
    offered = list(requests(PROMPTS, temperature=0.0, max_new_tokens=6))
    for index in (0, 3):
        offered[index] = replace(offered[index], sampling=replace(offered[index].sampling, max_new_tokens=0))
    served = serve(engine(slotted), "ngram", offered, concurrency=1)
    budgets = [0, 6, 6, 0, 6]
    assert served.outputs == [greedy(shared("llama"), p, n) for p, n in zip(PROMPTS, budgets, strict=True)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_end_of_the_context_ends_a_request(strategy: str, slotted: Slotted) -> None:
    """Prompt and output together fill the context, and the reason says so; drafts never pass its end."""
    prompt = tuple((3 * i) % VOCAB for i in range(CONTEXT - 9))
    offered = requests([prompt, (1, 2), prompt + (1,) * 9], temperature=0.0, max_new_tokens=30)
    served = serve(engine(slotted, width=CONTEXT + 40), strategy, offered)
    assert served.outputs[0] == greedy(shared("llama"), prompt, 9)
    assert served.outputs[1] == greedy(shared("llama"), (1, 2), 30)
    assert served.outputs[2] == []
    assert served.reasons == ["context", "length", "context"]


def test_the_width_of_the_cache_is_a_limit_too(slotted: Slotted) -> None:
    """In a cache narrower than the context a request ends with the cache, and a long prompt is refused."""
    opened = engine(slotted, width=12)
    offered = requests([(1, 2, 3, 4)], temperature=0.0, max_new_tokens=30)
    served = serve(opened, "draft:k=3", offered)
    assert served.outputs == [greedy(shared("llama"), (1, 2, 3, 4), 8)]
    assert served.reasons == ["context"]
    with pytest.raises(UsageError, match=r"has 13 tokens, .* 12"):
        serve(opened, "ordinary", requests([range(13)]))


def test_prompts_that_cannot_be_served_are_refused(slotted: Slotted) -> None:
    """A prompt longer than the context, or an empty one, is an error that names it and gives a hint."""
    opened = engine(slotted, width=200)
    with pytest.raises(UsageError, match=rf"'prompt-0' has {CONTEXT + 1} tokens, .* {CONTEXT}") as caught:
        serve(opened, "ordinary", requests([[1] * (CONTEXT + 1)]))
    assert caught.value.hint
    with pytest.raises(UsageError, match="empty prompt"):
        serve(opened, "ordinary", requests([[]]))
    # The engine is not left with half a batch.
    assert serve(opened, "draft", requests([(1, 2)], temperature=0.0, max_new_tokens=3)).outputs == [
        greedy(shared("llama"), (1, 2), 3)
    ]


def test_an_abandoned_schedule_leaves_nothing_behind(slotted: Slotted) -> None:
    """After a schedule that was dropped in mid-decode the same strategies serve the next one correctly."""
    opened = engine(slotted)
    for strategy in STRATEGIES:
        opened.open(strategy)
        events = opened.serve(Schedule(requests(PROMPTS, temperature=0.0), concurrency=3))
        list(itertools.islice(events, 9))
        events.close()  # type: ignore[attr-defined]
        served = serve(opened, strategy, requests(PROMPTS[::-1], temperature=0.0, max_new_tokens=9))
        assert served.outputs == [greedy(shared("llama"), prompt, 9) for prompt in PROMPTS[::-1]]


class Told:
    """A drafter that writes down which rows it was given and what it was told was accepted."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.rows: set[int] = set()
        self.accepted: list[list[int]] = []

    def prefill(self, first_row: int, prompts: Any, features: Any) -> None:
        """Rows come."""
        new = set(range(first_row, first_row + len(prompts)))
        assert not new & self.rows
        self.rows |= new
        self.inner.prefill(first_row, prompts, features)

    def fork(self, source: int, targets: Any) -> None:
        """Rows are copied."""
        assert source in self.rows
        self.rows |= set(targets)
        self.inner.fork(source, targets)

    def commit(self, accepted: Any, features: Any) -> None:
        """A step is over; the rows it was about are all the rows there are, without a gap."""
        assert self.rows == set(range(len(accepted)))
        self.accepted.append(list(accepted))
        self.inner.commit(accepted, features)

    def release(self, rows: Any) -> None:
        """Rows go."""
        assert set(rows) <= self.rows
        self.rows -= set(rows)
        self.inner.release(rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("is_abandoned", [False, True])
def test_a_drafter_is_told_what_happens(strategy: str, is_abandoned: bool, slotted: Slotted) -> None:
    """It hears what each round accepted, and of every row that goes, in a schedule that is dropped too."""
    opened = engine(slotted)
    opened.open(strategy)
    assert opened.strategy is not None
    told = Told(opened.strategy.drafter)
    opened.open(strategy, alter=lambda built: replace(built, drafter=told))
    offered = requests(PROMPTS, temperature=0.0, max_new_tokens=12)
    events = opened.serve(Schedule(offered, concurrency=3))
    if is_abandoned:
        list(itertools.islice(events, 9))
        assert told.rows
        events.close()  # type: ignore[attr-defined]
    else:
        served = collect(events)
        decode = [step.step for step in served.steps if step.phase == "decode"]
        assert told.accepted == [[r.accepted for r in served.rounds if r.step == step] for step in decode]
        assert any(map(any, told.accepted))
    assert told.rows == set()


# Who is in flight


def in_flight(served: Served) -> int:
    """Return the most requests that were in flight at one moment, by their own times."""
    moments = []
    for record in served.records.values():
        assert record.first_scheduled is not None
        moments += [(record.first_scheduled, 1), (record.finished, -1)]
    return max(itertools.accumulate(change for _, change in sorted(moments)))


@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_a_closed_loop_keeps_its_concurrency(concurrency: int, slotted: Slotted) -> None:
    """Never more than c requests are in flight; the next one arrives when one finishes, and not before."""
    offered = [
        replace(r, sampling=replace(r.sampling, max_new_tokens=3 + 2 * (r.id % 3)))
        for r in requests(PROMPTS * 2, temperature=0.0)
    ]
    served = serve(engine(slotted), "draft:k=2", offered, concurrency=concurrency)
    assert len(served.records) == 10
    assert in_flight(served) == concurrency
    assert max(step.batch for step in served.steps) == concurrency
    finishes = sorted(record.finished for record in served.records.values())
    for position, key in enumerate(sorted(served.records)):
        arrival = served.records[key].arrival
        assert sum(finish <= arrival for finish in finishes) >= position - concurrency + 1


def test_the_row_limit_holds(slotted: Slotted) -> None:
    """Eight clients on two rows: no forward has more than two requests, and everybody is served."""
    served = serve(
        engine(slotted, rows=2),
        "ngram",
        requests(PROMPTS * 2, temperature=0.0, max_new_tokens=5),
        concurrency=8,
    )
    assert max(step.batch for step in served.steps) == 2
    assert served.outputs == [greedy(shared("llama"), prompt, 5) for prompt in PROMPTS * 2]


class SkippingClock:
    """The real clock, but what is slept passes at once."""

    def __init__(self) -> None:
        self.origin = time.perf_counter()
        self.skipped = 0.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return time.perf_counter() - self.origin + self.skipped

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.sleeps.append(seconds)
        self.skipped += seconds


def a_loop(model: Any, strategy: str, **options: Any) -> StepLoop:
    """Return a step loop over a model, its strategy built with the same model as the draft."""
    runner = ModelRunner(model, SlotCache(8, CONTEXT))
    spec = registry.parse(strategy)
    resources = Resources(runner, model, 0, 8, CONTEXT)
    built = registry.module("strategy", spec.name).build(
        registry.options("strategy", spec), strategy, resources
    )
    return StepLoop(runner, built, **{"rows": 8, "eos_ids": (), **options})


def test_an_open_loop_waits_for_arrivals(slotted: Slotted) -> None:
    """Requests are scheduled at their arrival, in order of arrival, and the loop sleeps in between."""
    clock = SkippingClock()
    loop = a_loop(slotted("llama"), "draft:k=2", clock=clock, sleep=clock.sleep)
    arrivals = [100.0, 0.0, 200.0, 100.0, 99.5]
    offered = requests(PROMPTS, arrivals=arrivals, temperature=0.0, max_new_tokens=4)
    served = collect(loop.serve(Schedule(offered)))
    assert served.outputs == [greedy(shared("llama"), prompt, 4) for prompt in PROMPTS]
    for key, record in served.records.items():
        assert record.arrival == arrivals[key]
        assert record.first_scheduled is not None
        assert arrivals[key] <= record.first_scheduled < arrivals[key] + 20
    order = [event.record.request for event in served.events if isinstance(event, Finished)]
    assert [arrivals[key] for key in order] == sorted(arrivals)
    assert len(clock.sleeps) == 3  # before 99.5, 100 and 200
    assert sum(clock.sleeps) == pytest.approx(200, abs=20)
    assert Counter(step.batch for step in served.steps if step.phase == "prefill") == {1: 3, 2: 1}


def test_an_arrival_in_mid_decode_joins_the_batch(slotted: Slotted) -> None:
    """A request that arrives while another decodes is prefilled between its steps."""
    clock = SkippingClock()
    loop = a_loop(slotted("llama"), "ordinary", clock=clock, sleep=clock.sleep)
    offered = requests(PROMPTS[:2], arrivals=[0.0, 1000.0], temperature=0.0, max_new_tokens=30)
    kept = []
    for event in loop.serve(Schedule(offered)):
        kept.append(event)
        if len(kept) == 5:
            clock.skipped += 1000.0
    served = collect(kept)
    phases = [(step.phase, step.batch) for step in served.steps]
    assert phases[0] == ("prefill", 1)
    assert phases[6] == ("prefill", 1) or phases[5] == ("prefill", 1)
    assert ("decode", 2) in phases
    assert clock.sleeps == []
    assert served.outputs == [greedy(shared("llama"), prompt, 30) for prompt in PROMPTS[:2]]


# Cancelling


def test_a_request_can_be_cancelled(slotted: Slotted) -> None:
    """Cancelled in flight, a request keeps what it emitted; waiting, it emits nothing; others go on."""
    for strategy in STRATEGIES:
        opened = engine(slotted)
        opened.open(strategy)
        kept = []
        offered = requests(PROMPTS, temperature=0.0, max_new_tokens=20)
        for event in opened.serve(Schedule(offered, concurrency=3)):
            kept.append(event)
            if isinstance(event, Chunk) and event.request == 1:
                opened.cancel(1)
                opened.cancel(4)
        served = collect(kept)
        expected = [greedy(shared("llama"), prompt, 20) for prompt in PROMPTS]
        assert served.reasons == ["length", "cancelled", "length", "length", "cancelled"]
        assert [served.outputs[i] for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]
        assert 1 <= len(served.outputs[1]) < 20
        assert served.outputs[1] == expected[1][: len(served.outputs[1])]
        assert served.outputs[4] == []


# Prefill


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shared_prefill_changes_only_the_work(strategy: str, slotted: Slotted) -> None:
    """Samples of one prompt that share a prefill emit the same tokens, and fewer tokens are prefilled."""
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    offered = requests(prompts, temperature=1.0, max_new_tokens=10)
    alone, together = (
        serve(engine(slotted), strategy, offered, concurrency=5, share_prefill=share)
        for share in (False, True)
    )
    assert together.outputs == alone.outputs
    assert len({tuple(alone.outputs[i]) for i in (0, 2, 3, 6)}) > 1

    def prefilled(served: Served) -> int:
        return sum(step.tokens_in for step in served.steps if step.phase == "prefill")

    assert prefilled(alone) == sum(map(len, prompts))
    first_five = len(PROMPTS[0]) + len(PROMPTS[2]) + len(PROMPTS[1])
    rest = prefilled(together) - first_five
    assert len(PROMPTS[0]) <= rest <= len(PROMPTS[2]) + len(PROMPTS[0])


def test_long_prefills_are_divided(slotted: Slotted, monkeypatch: pytest.MonkeyPatch) -> None:
    """No prefill forward has more padded tokens than the limit, unless one prompt alone does."""
    monkeypatch.setattr(loop_module, "PREFILL_TOKENS", 24)
    for strategy in STRATEGIES:
        offered = requests(PROMPTS, temperature=0.0, max_new_tokens=5)
        served = serve(engine(slotted), strategy, offered, concurrency=5)
        assert served.outputs == [greedy(shared("llama"), prompt, 5) for prompt in PROMPTS]
        prefills = [step for step in served.steps if step.phase == "prefill"]
        assert [step.batch for step in prefills] == [2, 2, 1]


# Records


@pytest.mark.parametrize("strategy", ["ngram:k=3,min=1", "draft:k=3", "early-exit:layers=2,k=3"])
def test_drafts_are_kept_on_request(strategy: str, slotted: Slotted) -> None:
    """With `record_drafts` each round keeps its draft ids, of which the accepted ones reached the output."""
    offered = requests(PROMPTS, temperature=1.0, max_new_tokens=15)
    served = serve(engine(slotted), strategy, offered, record_drafts=True)
    without = serve(engine(slotted), strategy, offered)
    assert served.outputs == without.outputs
    assert all(entry.draft_tokens is None for entry in without.rounds)
    place = Counter[int]()
    for entry in served.rounds:
        output = served.records[entry.request].output_tokens[place[entry.request] :]
        place[entry.request] += entry.emitted
        if entry.drafted:
            assert entry.draft_tokens is not None
            assert entry.draft_probs is not None
            assert len(entry.draft_tokens) == len(entry.draft_probs) == entry.drafted
            assert entry.draft_tokens[: entry.accepted] == output[: entry.accepted]
            assert all(0 < q <= 1 for q in entry.draft_probs)
            if entry.rejected and strategy.startswith("ngram"):
                assert output[entry.accepted] != entry.draft_tokens[entry.accepted]
    assert any(entry.accepted for entry in served.rounds)


def test_recorded_q_is_the_law_of_the_draft(slotted: Slotted) -> None:
    """The q of each drafted token is what a plain forward of the draft gives it, and 1 for an n-gram."""
    target = slotted("llama")
    draft = perturbed(target, 0.1)
    opened = LocalEngine(target, eos_ids=(), draft=draft, rows=4, width=CONTEXT)
    offered = requests(PROMPTS[:3], temperature=0.7, max_new_tokens=12)
    served = serve(opened, "draft:k=3", offered, record_drafts=True)
    texts = {request.id: list(request.prompt) for request in offered}
    plain = copied(draft, "sdpa")
    for entry in served.rounds:
        start = len(texts[entry.request])
        for depth, (token, q) in enumerate(
            zip(entry.draft_tokens or (), entry.draft_probs or (), strict=True)
        ):
            context = [*texts[entry.request], *(entry.draft_tokens or ())[:depth]]
            law = (uncached(plain, context)[-1] / 0.7).softmax(-1)
            assert q == pytest.approx(float(law[token]), rel=1e-3)
        place = start - len(served.records[entry.request].prompt_tokens)
        texts[entry.request] += served.records[entry.request].output_tokens[place : place + entry.emitted]
    ngram = serve(opened, "ngram:min=1", offered, record_drafts=True)
    kept = [q for entry in ngram.rounds for q in entry.draft_probs or ()]
    assert kept
    assert set(kept) == {1.0}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_times_of_a_step_add_up(strategy: str, slotted: Slotted) -> None:
    """Draft, verify, commit and host time sum to the wall time of each step, and steps do not overlap."""
    served = serve(engine(slotted), strategy, requests(PROMPTS, max_new_tokens=10))
    for step in served.steps:
        assert (step.draft_s is None) == (strategy == "ordinary")
        assert step.verify_s is not None
        assert step.commit_s is not None
        assert step.host_s is not None
        assert step.forward_s is not None
        parts = (step.draft_s or 0.0) + step.verify_s + step.commit_s + step.host_s
        assert parts == pytest.approx(step.wall_s, rel=0.01, abs=2e-5)
        assert 0 < step.forward_s <= step.wall_s
        assert min(step.draft_s or 0.0, step.verify_s, step.commit_s, step.host_s) >= 0
    for before, after in itertools.pairwise(served.steps):
        assert before.started + before.wall_s <= after.started


def test_steps_count_what_they_computed(slotted: Slotted) -> None:
    """Tokens, slots and contexts of each step follow from its rounds and the tokens emitted before."""
    served = serve(engine(slotted), "draft:k=3", requests(PROMPTS, max_new_tokens=9))
    lengths = {key: len(record.prompt_tokens) for key, record in served.records.items()}
    for step in served.steps:
        rows = [entry for entry in served.rounds if entry.step == step.step]
        assert step.batch == len(rows)
        drafted = sum(entry.drafted for entry in rows)
        prompts = sum(lengths[entry.request] for entry in rows)
        assert step.tokens_in == (prompts if step.phase == "prefill" else drafted + len(rows))
        assert step.kv_lookahead == drafted
        for entry in rows:
            lengths[entry.request] += entry.emitted
        assert step.context_max == max(lengths[entry.request] for entry in rows)


READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__iter__")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Record which device-to-host reads each decode step makes."""
    steps: list[list[str]] = []
    is_decoding = False

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def read(*arguments: Any, **named: Any) -> Any:
            if is_decoding:
                steps[-1].append(name)
            return original(*arguments, **named)

        return read

    original = StepLoop._decode

    def decode(self: StepLoop) -> Any:
        nonlocal is_decoding
        steps.append([])
        is_decoding = True
        try:
            return original(self)
        finally:
            is_decoding = False

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    monkeypatch.setattr(StepLoop, "_decode", decode)
    return steps


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_decode_step_reads_from_the_device_once(
    strategy: str, temperature: float, reads: list[list[str]], slotted: Slotted
) -> None:
    """Each decode step makes exactly one host read, whatever drafts and whatever the batch."""
    opened = engine(slotted)
    serve(opened, strategy, requests(PROMPTS, temperature=temperature, max_new_tokens=8))
    assert len(reads) > 5
    assert {tuple(step) for step in reads} == {("tolist",)}


def test_unlike_requests_share_a_batch(slotted: Slotted) -> None:
    """Requests with different sampling decode in one batch to what each decodes alone."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.1},
        {"temperature": 1.0},
    ]
    offered = [
        Request(i, prompt, requests([prompt], seed=i, max_new_tokens=14, **kind)[0].sampling, f"p{i}")
        for i, (prompt, kind) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]
    for strategy in STRATEGIES:
        opened = engine(slotted)
        together = serve(opened, strategy, offered, concurrency=5)
        alone = [serve(opened, strategy, [request]).outputs[0] for request in offered]
        assert together.outputs == alone


def test_a_strategy_must_be_open(slotted: Slotted) -> None:
    """Serving without a strategy is an error that says what to call."""
    with pytest.raises(UsageError, match="no strategy is open"):
        engine(slotted).serve(Schedule(()))


def test_an_empty_schedule_is_over_at_once(slotted: Slotted) -> None:
    """Nothing to serve gives no event."""
    assert serve(engine(slotted), "ordinary", ()).events == ()


def test_closing_frees_the_cache(slotted: Slotted) -> None:
    """After `close` the engine holds no slots and no strategy."""
    opened = engine(slotted)
    serve(opened, "draft", requests([(1, 2)], max_new_tokens=3))
    opened.close()
    assert not opened.runner.cache.keys
    assert opened.strategy is None


def test_memory_is_what_models_and_caches_hold(slotted: Slotted) -> None:
    """Weights, KV per token and lookahead of each strategy; a shared cache counts nothing twice."""
    opened = engine(slotted)
    weights = sum(p.numel() * 4 for p in shared("llama").parameters())
    per_token = 3 * 2 * 2 * 8 * 4
    expected = {
        "ordinary": (0, 0, 0),
        "ngram:k=3": (0, 0, 3),
        "draft:k=2": (weights, per_token, 2),
        "early-exit:layers=2,k=3": (0, 0, 3),
    }
    for strategy, (draft, draft_kv, lookahead) in expected.items():
        serve(opened, strategy, requests([(1, 2)], max_new_tokens=4))
        memory = opened.memory()
        assert memory.target_weights == weights
        assert memory.target_kv_per_token == per_token
        assert (memory.draft_weights, memory.draft_kv_per_token) == (draft, draft_kv)
        assert memory.lookahead_tokens == lookahead
        assert memory.peak_bytes
        assert memory.peak_source == "peak RSS of the process"


def test_a_tiny_context_is_enough(slotted: Slotted) -> None:
    """A model whose context is the shortest that the probe accepts decodes to its end."""
    model = build("gpt2", n_positions=20)
    opened = LocalEngine(copied(model, "sdpa"), eos_ids=(), rows=2, width=64)
    served = serve(opened, "early-exit:layers=3,k=4", requests([(1, 2)], temperature=0.0))
    assert served.outputs == [greedy(model, (1, 2), 18)]
    assert served.reasons == ["context"]
