"""The simulated engine: records that can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import Served, collect, requests

from specbench.engines.simulated import Options, SimulatedEngine
from specbench.errors import UsageError
from specbench.records import RoundRecord, Schedule, StepRecord
from specbench.runtime.events import Chunk, Finished


def play(strategy: str, offered: Any, *, concurrency: int | None = 1, **options: Any) -> Served:
    """Play requests at given costs; the records must satisfy the identities."""
    engine = SimulatedEngine(Options(**options))
    engine.open(strategy)
    return collect(engine.serve(Schedule(tuple(offered), concurrency=concurrency)))


def near(*values: float) -> Any:
    """Return times that equal these up to rounding."""
    return pytest.approx(values, abs=1e-12)


COSTS = {"target_ms": 8.0, "draft_ms": 1.0, "verify_ms": 9.0}
PROMPT = (1, 2, 3, 4, 5)


def test_ordinary_decoding_step_by_step() -> None:
    """Three tokens are a prefill and two steps of 8 ms, one token each, and nothing drafted."""
    served = play("ordinary", requests([PROMPT], max_new_tokens=3), **COSTS)
    assert served.records[0].chunk_times == near(0.008, 0.016, 0.024)
    assert served.records[0].chunk_sizes == (1, 1, 1)
    assert served.records[0].finished == pytest.approx(0.024)
    assert [step.phase for step in served.steps] == ["prefill", "decode", "decode"]
    assert [step.context_max for step in served.steps] == [6, 7, 8]
    assert all(step.draft_s is None and step.kv_lookahead == 0 for step in served.steps)
    assert served.rounds == (
        RoundRecord(0, 0, 0, 0, 0, 0, False, 1, "none"),
        RoundRecord(1, 0, 1, 0, 0, 0, False, 1, "none"),
        RoundRecord(2, 0, 2, 0, 0, 0, False, 1, "budget"),
    )


def test_everything_accepted() -> None:
    """At alpha 1 with k = 3: 8 ms of prefill, then 4 tokens every 12 ms; the last draft fits the budget."""
    served = play("draft:k=3", requests([PROMPT], max_new_tokens=11), alpha=1.0, **COSTS)
    assert served.rounds == (
        RoundRecord(0, 0, 0, 0, 0, 0, False, 1, "none"),
        RoundRecord(1, 0, 1, 3, 3, 3, False, 4, "none"),
        RoundRecord(2, 0, 2, 3, 3, 3, False, 4, "none"),
        RoundRecord(3, 0, 3, 1, 1, 1, False, 2, "budget"),
    )
    assert served.records[0].chunk_times == near(0.008, 0.020, 0.032, 0.042)
    assert served.steps[1] == StepRecord(
        step=1,
        batch=1,
        tokens_in=4,
        tokens_padded=0,
        context_max=10,
        phase="decode",
        started=pytest.approx(0.008),
        wall_s=pytest.approx(0.012),
        draft_s=pytest.approx(0.003),
        verify_s=pytest.approx(0.009),
        commit_s=0.0,
        host_s=0.0,
        forward_s=pytest.approx(0.012),
        dispatch="eager",
        kv_committed=10,
        kv_lookahead=3,
        kv_draft=0,
    )


def test_nothing_accepted() -> None:
    """At alpha 0 every round rejects its first token and emits one; the last has no room for a draft."""
    served = play("ngram:k=2", requests([PROMPT], max_new_tokens=4), alpha=0.0, **COSTS)
    assert served.rounds == (
        RoundRecord(0, 0, 0, 0, 0, 0, False, 1, "none"),
        RoundRecord(1, 0, 1, 2, 2, 0, True, 1, "none"),
        RoundRecord(2, 0, 2, 1, 1, 0, True, 1, "none"),
        RoundRecord(3, 0, 3, 0, 0, 0, False, 1, "budget"),
    )
    assert served.records[0].chunk_times == near(0.008, 0.019, 0.029, 0.037)


def test_acceptance_is_alpha_in_the_long_run() -> None:
    """Of 20,000 tested tokens a share of .8 is accepted, give or take a hundredth, independent of k."""
    for k in (1, 5):
        served = play(f"draft:k={k}", requests([PROMPT] * 20, max_new_tokens=800), alpha=0.8, **COSTS)
        accepted = sum(entry.accepted for entry in served.rounds)
        tested = accepted + sum(entry.rejected for entry in served.rounds)
        assert accepted / tested == pytest.approx(0.8, abs=0.01)


def test_a_closed_loop_serves_clients_in_turn() -> None:
    """Two clients: the third request arrives when the first one finishes, and is prefilled alone."""
    budgets = [2, 3, 1]
    offered = [requests([PROMPT], max_new_tokens=budget)[0] for budget in budgets]
    offered = [type(r)(i, r.prompt, r.sampling, f"p{i}") for i, r in enumerate(offered)]
    served = play("ordinary", offered, concurrency=2, row_ms=1.0, **COSTS)
    assert [step.batch for step in served.steps] == [2, 2, 1, 1]
    assert [step.phase for step in served.steps] == ["prefill", "decode", "prefill", "decode"]
    assert [step.wall_s for step in served.steps] == near(0.009, 0.009, 0.008, 0.008)
    assert [served.records[i].arrival for i in range(3)] == near(0.0, 0.0, 0.018)
    assert served.records[2].chunk_times == near(0.026)
    assert served.records[1].chunk_times == near(0.009, 0.018, 0.034)


def test_an_open_loop_keeps_arrivals() -> None:
    """A request that comes while another decodes waits for its step; one that comes later finds it idle."""
    offered = requests([PROMPT] * 3, arrivals=[0.010, 0.0, 0.5], max_new_tokens=2)
    served = play("ordinary", offered, concurrency=None, **COSTS)
    assert [served.records[i].arrival for i in range(3)] == [0.010, 0.0, 0.5]
    assert [served.records[i].first_scheduled for i in range(3)] == [pytest.approx(0.016), 0.0, 0.5]
    assert served.records[1].chunk_times == near(0.008, 0.016)
    assert served.records[0].chunk_times == near(0.024, 0.032)
    assert served.records[2].chunk_times == near(0.508, 0.516)


def test_the_row_limit_holds() -> None:
    """With rows=2 no step has more than two requests, whatever the load."""
    for concurrency in (None, 5):
        offered = requests([PROMPT] * 7, max_new_tokens=5)
        served = play("draft:k=2", offered, concurrency=concurrency, rows=2)
        assert max(step.batch for step in served.steps) == 2
        assert len(served.records) == 7


def test_nothing_to_emit_takes_no_time() -> None:
    """A budget of 0 is over at once, without a step."""
    offered = [*requests([PROMPT], max_new_tokens=0), *requests([PROMPT, PROMPT], max_new_tokens=2)[1:]]
    served = play("draft", offered, **COSTS)
    assert served.records[0].finished == 0.0
    assert served.records[0].output_tokens == ()
    assert served.records[1].chunk_times == near(0.008, 0.016)
    assert play("draft", requests([PROMPT], max_new_tokens=0)).steps == ()


def test_a_request_can_be_cancelled() -> None:
    """Cancelled in flight, it ends after its next step; waiting, at once; the next schedule is as usual."""
    engine = SimulatedEngine(Options(**COSTS))
    engine.open("ordinary")
    schedule = Schedule(requests([PROMPT] * 3, max_new_tokens=5), concurrency=2)
    events = engine.serve(schedule)
    kept = [next(events)]
    assert isinstance(kept[0], Chunk)
    engine.cancel(0)
    engine.cancel(2)
    served = collect([*kept, *events])
    assert served.reasons == ["cancelled", "length", "cancelled"]
    assert [len(output) for output in served.outputs] == [2, 5, 0]
    assert collect(engine.serve(schedule)).reasons == ["length"] * 3


@pytest.mark.parametrize(
    ("strategy", "draft"),
    [("ordinary", 0), ("draft:k=7", 7), ("draft", 4), ("ngram", 4), ("early-exit", 3)],
)
def test_the_draft_length_is_the_strategys(strategy: str, draft: int) -> None:
    """`k` is what the strategy says, or its own default."""
    opened = SimulatedEngine(Options()).open(strategy)
    assert (opened.name, opened.lossless, opened.max_draft) == (strategy, True, draft)


@pytest.mark.parametrize("strategy", ["drfat:k=3", "draft:q=3", "draft:k=many"])
def test_what_a_strategy_does_not_have_is_refused(strategy: str) -> None:
    """Unknown names, options and values are usage errors here too."""
    with pytest.raises(UsageError):
        SimulatedEngine(Options()).open(strategy)


@pytest.mark.parametrize(
    "options", [{"alpha": 1.5}, {"alpha": -0.1}, {"draft_ms": -1.0}, {"rows": 0}, {"row_ms": -1.0}]
)
def test_costs_without_a_meaning_are_refused(options: dict[str, Any]) -> None:
    """Acceptance is a probability, costs are not negative, and there is a row."""
    with pytest.raises(ValueError, match=r"expected|costs"):
        Options(**options)


def test_it_says_what_it_is() -> None:
    """Nothing is held, nothing can be audited, and the engine is marked as simulated."""
    engine = SimulatedEngine(Options())
    assert engine.capabilities.is_simulated
    assert not engine.capabilities.can_audit
    assert engine.memory().target_weights is None
    engine.close()


def test_finished_follows_the_last_chunk() -> None:
    """Each request's chunks come before its end."""
    engine = SimulatedEngine(Options())
    engine.open("draft:k=2")
    seen: set[int] = set()
    for event in engine.serve(Schedule(requests([PROMPT] * 4, max_new_tokens=6), concurrency=3)):
        if isinstance(event, Finished):
            seen.add(event.record.request)
        elif isinstance(event, Chunk):
            assert event.request not in seen
