"""How many tokens to draft: what each policy chooses, and that none of them changes what is emitted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_models import CONTEXT, Served, build, collect, copied, greedy, perturbed, requests, shared, uncached

from specbench import registry
from specbench.audit import continuations as check
from specbench.audit.chi_squared import ChiSquaredResult, judge
from specbench.audit.reference import Oracle
from specbench.cli import main
from specbench.decoding.verification import Proposal
from specbench.engines.local import LocalEngine
from specbench.errors import UsageError
from specbench.policies import ema, length_policy
from specbench.policies.confidence import Confidence
from specbench.policies.ema import Ema
from specbench.policies.fixed import Fixed
from specbench.records import RoundRecord, SamplingParams, Schedule
from specbench.runtime.protocols import BatchView, DraftContext, LengthPolicy, StepView, Strategy

PROMPTS = ((3, 1, 4, 1, 5, 2), (2,), (0, 1, 0, 1, 0), (7, 7, 8, 9, 3, 7, 7))


def view(batch: int) -> BatchView:
    """Return a batch of so many rows."""
    return BatchView([9] * batch, [50] * batch, 100)


def play(policy: LengthPolicy, share: Sequence[float], batch: int = 1) -> list[int]:
    """Let a policy choose a length for each step, of which that share is accepted; return the lengths."""
    chosen = []
    for accepted in share:
        lengths = policy.choose(view(batch))
        assert len(set(lengths)) == 1
        chosen.append(lengths[0])
        policy.observe(StepView(lengths, [round(accepted * length) for length in lengths]))
    return chosen


def policy(k: int = 7, **options: Any) -> Ema:
    """Return an EMA policy."""
    return Ema(k, ema.Options(**options))


# Fixed and confidence


def test_fixed_is_always_k() -> None:
    """`fixed`, the default, chooses the strategy's k whatever happens."""
    fixed = length_policy("fixed", 5)
    assert isinstance(fixed, Fixed)
    assert (fixed.max_length, fixed.stop_below) == (5, 0.0)
    assert play(fixed, [0, 1, 0], batch=3) == [5, 5, 5]


def test_confidence_allows_k_and_stops_below_its_threshold() -> None:
    """`confidence` leaves the length at k and passes its threshold to the drafter."""
    built = length_policy("confidence(threshold=0.25)", 6)
    assert isinstance(built, Confidence)
    assert (built.max_length, built.stop_below) == (6, 0.25)
    assert play(built, [0, 0]) == [6, 6]


# EMA


def test_the_defaults_are_the_published_ones() -> None:
    """Ladders by batch size, and alpha, warm-up and interval, are those SGLang publishes."""
    defaults = ema.Options()
    assert ema.ladders(defaults.tiers) == {1: [1, 3, 5, 7], 8: [0, 1, 3], 32: [0, 1], 64: [0]}
    assert (defaults.alpha, defaults.warmup, defaults.interval) == (0.2, 10, 5)
    assert (defaults.up, defaults.down) == (0.0, 0.25)


@pytest.mark.parametrize(
    ("batch", "k", "lengths"),
    [
        (1, 7, [1, 3, 5, 7]),
        (7, 4, [1, 3, 4]),
        (8, 4, [0, 1, 3]),
        (31, 2, [0, 1, 2]),
        (32, 4, [0, 1]),
        (63, 1, [0, 1]),
        (64, 4, [0]),
        (1000, 4, [0]),
    ],
)
def test_each_range_of_batch_sizes_has_its_ladder_clipped_to_k(
    batch: int, k: int, lengths: list[int]
) -> None:
    """A batch uses the ladder of the largest size not above it, and no length exceeds k."""
    assert policy(k).tier(batch).lengths == lengths


def test_max_length_is_what_some_tier_can_choose() -> None:
    """The most ever chosen is k, or less where no ladder reaches it."""
    assert [policy(k).max_length for k in (1, 4, 7, 12)] == [1, 4, 7, 7]


@pytest.mark.parametrize(
    ("tiers", "batch"),
    [
        (ema.Options().tiers, 7),
        ("1:1-3", None),
        ("1:0/8:1-7/9:0", 8),
        ("1:0-1/16:3", 16),
    ],
)
def test_the_lively_batch_is_one_at_which_the_longest_drafts_occur(tiers: str, batch: int | None) -> None:
    """With the defaults 7 rows, one less than begins the tier of shorter drafts; other policies: any."""
    made = policy(5, tiers=tiers)
    assert made.lively_batch == batch
    assert made.tier(batch or 99).lengths[-1] == made.max_length
    assert {length_policy(name, 5).lively_batch for name in ("fixed", "confidence")} == {None}


def test_the_first_length_is_k_or_the_middle_of_the_ladder() -> None:
    """A ladder that has k begins with it; another one in its middle."""
    assert [policy(k).choose(view(1))[0] for k in (1, 4, 7, 12)] == [1, 4, 7, 5]
    assert policy(5).choose(view(9)) == [1] * 9
    assert policy(3).choose(view(9)) == [3] * 9


def test_nothing_changes_before_the_warm_up_is_over_nor_between_intervals() -> None:
    """With nothing accepted the length falls at step warmup + interval, not before."""
    assert play(policy(7), [0.0] * 15) == [7] * 15
    assert play(policy(7), [0.0] * 16)[-1] < 7
    assert play(policy(7, warmup=0, interval=1, alpha=1.0), [0.0] * 3) == [7, 1, 1]
    assert play(policy(7, warmup=3, interval=2, alpha=1.0), [0.0] * 7) == [7] * 5 + [1] * 2


def test_the_length_climbs_while_all_is_accepted_and_falls_when_nothing_is() -> None:
    """From the shortest length, full acceptance leads to the longest; none leads back to the shortest."""
    built = policy(7)
    play(built, [0.0] * 60)
    assert built.choose(view(1)) == [1]
    climb = play(built, [1.0] * 80)
    assert climb == sorted(climb)
    assert set(climb) == {1, 3, 5, 7}
    fall = play(built, [0.0] * 40)
    assert fall == sorted(fall, reverse=True)
    assert fall[-1] == 1


def test_an_average_is_weighted_by_alpha() -> None:
    """The average starts at length - 1 and moves by alpha of the distance, the batch's mean counting once."""
    built = policy(3, tiers="1:3", alpha=0.25)
    built.observe(StepView([3, 3], [3, 0]))
    assert built.tier(2).average == pytest.approx(2 + 0.25 * (1.5 - 2))


@pytest.mark.parametrize(
    ("average", "length"), [(2.25, 3), (2.26, 5), (4.5, 5), (4.51, 7), (0.25, 1), (0.26, 3)]
)
def test_margins_leave_room_in_which_nothing_changes(average: float, length: int) -> None:
    """At length 5 of 1, 3, 5, 7 nothing changes while the average is above 2.25 and at most 4.5."""
    tier = ema.Tier([1, 3, 5, 7], 5, ema.Options(warmup=0, interval=1, alpha=1.0))
    tier.average = average
    tier.observe([])
    assert tier.length == length


def test_the_margin_keeps_a_length_from_swinging() -> None:
    """Acceptance between the thresholds of lengths 3 and 5 keeps either; without margins they are one."""
    held = {}
    for start in (3, 5):
        tier = ema.Tier([3, 5], start, ema.Options(warmup=0, interval=1, alpha=1.0))
        for _ in range(4):
            tier.observe([2, 3, 2])  # 2.33 tokens: above 2.25, not above 2.5
        held[start] = tier.length
    assert held == {3: 3, 5: 5}
    tier = ema.Tier([3, 5], 5, ema.Options(warmup=0, interval=1, alpha=1.0, down=0.0))
    tier.observe([2, 3, 2])
    assert tier.length == 3


def test_a_margin_upwards_slows_the_climb() -> None:
    """`up` asks for more than half a token below the length."""
    lengths = []
    for up in (0.0, 0.4):
        tier = ema.Tier([3, 5], 3, ema.Options(warmup=0, interval=1, alpha=1.0, up=up))
        tier.observe([2, 3, 3])
        lengths.append(tier.length)
    assert lengths == [5, 3]


def test_a_length_of_zero_is_probed() -> None:
    """Switched off, drafting is tried at every other interval, as short as can be, and kept if it pays."""
    built = policy(3, warmup=0)
    off = play(built, [0.0] * 40, batch=8)
    assert off[:5] == [3] * 5
    assert off[-20:] == [0] * 5 + [1] * 5 + [0] * 5 + [1] * 5
    back = play(built, [1.0] * 40, batch=8)
    assert back[-10:] == [3] * 10


def test_a_ladder_of_nothing_but_zero_never_drafts() -> None:
    """At 64 requests and more nothing is drafted, nor tried."""
    assert play(policy(7, warmup=0), [1.0] * 30, batch=64) == [0] * 30


def test_a_ladder_that_begins_at_zero_starts_its_average_at_the_first_probe() -> None:
    """A tier that begins without a draft has no average to judge by until it drafted."""
    tier = ema.Tier([0, 2], 0, ema.Options(warmup=0, interval=1))
    assert (tier.length, tier.average) == (0, None)
    tier.observe([])
    assert (tier.length, tier.average) == (2, 1.0)
    assert policy(9, tiers="1:0-1").choose(view(2)) == [1, 1]


def test_tiers_learn_apart() -> None:
    """What a large batch rejects does not shorten the drafts of a small one."""
    built = policy(7, warmup=0)
    play(built, [0.0] * 30, batch=8)
    assert built.choose(view(1)) == [7]
    assert built.choose(view(8)) in ([0] * 8, [1] * 8)


def test_rows_without_a_draft_say_nothing() -> None:
    """Rows that offered nothing leave the average alone, but the step counts."""
    built = policy(3, tiers="1:1-3")
    built.observe(StepView([3, 0, 0], [3, 0, 0]))
    assert built.tier(1).average == pytest.approx(2 + 0.2)
    built.observe(StepView([0, 0, 0], [0, 0, 0]))
    assert built.tier(1).average == pytest.approx(2 + 0.2)
    assert built.tier(1).steps == 2


def test_reset_forgets() -> None:
    """After `reset` a policy does what a new one does."""
    built = policy(7, warmup=0)
    share = [0.3, 1.0, 0.0, 0.0, 0.6] * 8
    first = play(built, share)
    assert play(built, share) != first
    built.reset()
    assert play(built, share) == first


# Specs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("draft:k=4,policy=emma", ["no policy 'emma'", "did you mean 'ema'?"]),
        ("draft:policy=ema(warmpu=20)", ["no option 'warmpu'", "did you mean 'warmup'?"]),
        ("draft:policy=ema(warmup=soon)", ["warmup=soon is not a whole number"]),
        ("draft:policy=ema(warmup=-1)", ["policy 'ema(warmup=-1)'", "warmup=-1"]),
        ("draft:policy=ema(interval=0)", ["interval=0"]),
        ("draft:policy=ema(alpha=0)", ["alpha=0.0", "above 0"]),
        ("draft:policy=ema(up=0.5)", ["up=0.5", "below 0.5"]),
        ("draft:policy=ema(down=-1)", ["down=-1.0", "at least 0"]),
        ("draft:policy=ema(tiers=8:1-3)", ["batch size 1"]),
        ("draft:policy=ema(tiers=1:1-3/1:2)", ["cannot read tiers=1:1-3/1:2"]),
        ("draft:policy=ema(tiers=1:)", ["cannot read tiers=1:"]),
        ("draft:policy=ema(tiers=1:-1)", ["cannot read tiers=1:-1"]),
        ("draft:policy=confidence(threshold=0)", ["threshold=0.0", "above 0"]),
        ("draft:policy=confidence(threshold=1.5)", ["threshold=1.5"]),
        ("draft:policy=fixed(k=3)", ["has no option 'k'"]),
        ("draft:policy=ema(warmup=20,k=4", ["brackets", "do not match"]),
        ("draft:policy=ema),k=4", ["brackets", "do not match"]),
        ("draft:policy=ema(warmup)", ["cannot read 'warmup'", "expected key=value"]),
        ("draft:policy=ema(warmup=1,warmup=2)", ["'warmup' is given twice"]),
        ("draft:policy=(warmup=1)", ["cannot read '(warmup=1)'"]),
        ("draft:policy=ema(warmup=1)x", ["cannot read 'ema(warmup=1)x'"]),
        ("ordinary:policy=ema", ["has no option 'policy'"]),
    ],
)
def test_a_wrong_policy_is_one_line_that_names_it(text: str, words: list[str]) -> None:
    """What is unknown or cannot be is named, with the near miss, before anything is built."""
    with pytest.raises(UsageError) as caught:
        registry.options("strategy", registry.parse(text))
    for word in words:
        assert word in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "text",
    ["ngram:k=5,policy=ema(warmup=20,tiers=1:1-3/8:0-1),min=1", "draft:policy=confidence", "ordinary"],
)
def test_commas_in_brackets_belong_to_the_value(text: str) -> None:
    """A spec with a nested one is read into its options, and written back as it was."""
    spec = registry.parse(text)
    assert str(spec) == text
    options = registry.options("strategy", spec)
    if "(" in text:
        assert (options.k, options.min) == (5, 1)
        assert options.policy == "ema(warmup=20,tiers=1:1-3/8:0-1)"
        nested = registry.parse_nested(options.policy)
        assert (nested.name, nested.options) == ("ema", {"warmup": "20", "tiers": "1:1-3/8:0-1"})
        assert str(nested) == options.policy


def test_empty_brackets_are_no_options() -> None:
    """`ema()` is `ema`."""
    assert registry.parse_nested("ema()") == registry.parse_nested("ema")


def test_policies_are_listed_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    """`specbench list policies` shows each with its options in brackets, ready to paste, and a summary."""
    assert main(["list", "policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("(")[0].split()[0] for line in lines] == ["confidence", "ema", "fixed"]
    for line in lines:
        call, summary = line.split(" ", 1)
        assert length_policy(call, 3).max_length == 3
        assert summary.strip()
    assert main(["list", "policies", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["options"] == "threshold=0.4"


# In the loop


ADAPTIVE = "ema(alpha=0.5,warmup=1,interval=1,tiers=1:0-1-2-4)"
SURE = "confidence(threshold=0.35)"


def engine_for(model: Any, noise: float = 0.2, rows: int = 8) -> LocalEngine:
    """Return an engine whose draft is right now and then."""
    draft = perturbed(model, noise)
    return LocalEngine(copied(model, "sdpa"), eos_ids=(), draft=draft, rows=rows, width=CONTEXT)


def serve(engine: LocalEngine, spec: str, temperature: float = 0.0, num: int = 40) -> Served:
    """Serve the prompts twice over, three at a time."""
    engine.open(spec)
    offered = requests(PROMPTS * 2, temperature=temperature, max_new_tokens=num)
    return collect(engine.serve(Schedule(offered, concurrency=3, record_drafts=True)))


@pytest.mark.parametrize("policy", [ADAPTIVE, SURE, "ema"])
@pytest.mark.parametrize("strategy", ["draft:k=4", "early-exit:layers=2,k=4", "ngram:k=4,min=1"])
def test_greedy_output_is_the_oracles_and_lengths_vary(strategy: str, policy: str) -> None:
    """At temperature 0 no policy changes a token, though drafts of several lengths were offered."""
    served = serve(engine_for(shared("llama")), f"{strategy},policy={policy}")
    assert served.outputs == [greedy(shared("llama"), prompt, 40) for prompt in PROMPTS * 2]
    lengths = {entry.drafted for entry in served.rounds if entry.round}
    assert len(lengths) >= 3
    assert max(lengths) <= 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", [ADAPTIVE, SURE])
def test_the_same_schedule_twice_gives_the_same_records(policy: str, temperature: float) -> None:
    """A policy remembers nothing of an earlier schedule: rounds and outputs are the same the second time."""
    engine = engine_for(shared("llama"))
    one, two = (serve(engine, f"draft:k=4,policy={policy}", temperature) for _ in range(2))
    assert one.rounds == two.rounds
    assert one.outputs == two.outputs


def offers(served: Served, most: int) -> Iterator[tuple[RoundRecord, list[int], int]]:
    """Yield each round with a draft, the text before it, and how many tokens it could have offered."""
    for key, record in served.records.items():
        text = list(record.prompt_tokens)
        for entry in served.rounds:
            if entry.request == key:
                produced = len(text) - len(record.prompt_tokens)
                if entry.drafted:
                    yield entry, text, min(most, record.sampling.max_new_tokens - produced - 1)
                text = [*text, *record.output_tokens[produced : produced + entry.emitted]]


def test_a_draft_ends_with_its_first_unlikely_token() -> None:
    """Only the last token of a draft is below the threshold, and if the draft ended early it is."""
    served = serve(engine_for(shared("llama")), "draft:k=4,policy=confidence(threshold=0.35)", 0.7)
    short = 0
    for entry, _, room in offers(served, 4):
        *before, last = entry.draft_probs or ()
        assert all(prob >= 0.35 for prob in before)
        assert entry.drafted == room or last < 0.35
        short += entry.drafted < room
    assert short > 20


def test_a_greedy_draft_ends_with_its_first_doubt() -> None:
    """At temperature 0 the draft's softmax decides, though every drafted token was certain to be drawn."""
    engine = engine_for(shared("llama"))
    served = serve(engine, "draft:k=4,policy=confidence(threshold=0.35)")
    short = 0
    for entry, text, room in offers(served, 4):
        drafts = entry.draft_tokens or ()
        assert set(entry.draft_probs or ()) == {1.0}
        laws = uncached(engine.draft, [*text, *drafts])[len(text) - 1 : -1].softmax(-1)
        *before, last = (float(law[token]) for law, token in zip(laws, drafts, strict=True))
        assert all(prob >= 0.35 for prob in before)
        assert entry.drafted == room or last < 0.35
        short += entry.drafted < room
    assert short > 20


def test_a_batch_of_both_kinds_stops_each_by_its_own_law() -> None:
    """Beside a sampled request a greedy one is drafted for as it is alone."""
    engine = engine_for(shared("llama"))
    spec = "draft:k=4,policy=confidence(threshold=0.35)"
    offered = [
        replace(request, sampling=replace(request.sampling, temperature=0.7 * (request.id % 2)))
        for request in requests(PROMPTS, temperature=0.0, max_new_tokens=20)
    ]
    drafted: dict[int, list[list[tuple[int, ...] | None]]] = {request.id: [] for request in offered}
    for served in [offered, *([request] for request in offered)]:
        engine.open(spec)
        rounds = collect(engine.serve(Schedule(tuple(served), concurrency=4, record_drafts=True))).rounds
        for request in served:
            drafted[request.id].append(
                [e.draft_tokens for e in rounds if e.request == request.id and e.round]
            )
    for together, alone in drafted.values():
        assert [tokens or () for tokens in together] == [tokens or () for tokens in alone]


def test_no_threshold_stops_certain_drafts() -> None:
    """N-grams have probability 1: with `confidence` they are what they are with `fixed`."""
    engine = engine_for(shared("llama"))
    fixed = serve(engine, "ngram:k=4,min=1", temperature=1.0)
    sure = serve(engine, "ngram:k=4,min=1,policy=confidence(threshold=1)", temperature=1.0)
    assert [entry.draft_tokens for entry in sure.rounds] == [entry.draft_tokens for entry in fixed.rounds]
    assert sure.outputs == fixed.outputs
    assert any(entry.drafted for entry in sure.rounds)


def test_stopping_early_saves_forwards() -> None:
    """Once all rows have stopped, the draft is not run again: as many forwards as the deepest draft."""
    engine = engine_for(shared("llama"))
    engine.open("draft:k=4,policy=confidence(threshold=1)")
    assert engine.strategy is not None
    drafter: Any = engine.strategy.drafter
    (runner,) = drafter.runners
    propose = drafter.propose
    extra: list[int] = []

    def counting(context: DraftContext) -> Proposal:
        before = len(runner.forwards)
        proposal: Proposal = propose(context)
        extra.append(len(runner.forwards) - before - max(proposal.offered))
        return proposal

    drafter.propose = counting
    offered = requests(PROMPTS, temperature=1.0, max_new_tokens=12)
    served = collect(engine.serve(Schedule(offered, concurrency=4)))
    assert set(extra) == {0}
    assert {entry.drafted for entry in served.rounds if entry.round} <= {0, 1}


# The law


VOCAB = 8
DRAWS = 2000
SEED = 4_321
ALPHA = 1e-3
HORIZON = 6
LAW_PROMPTS = ((1, 2, 3, 1, 2, 3, 1), (5,))
STOP = "draft:k=3,policy=confidence(threshold=0.3)"


class Dropping:
    """The fault: a token below the threshold is looked at and then not offered."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def propose(self, context: DraftContext) -> Proposal:
        """Draft, then take back a last token that was unlikely."""
        proposal = self.inner.propose(context)
        probs = proposal.q.prob_of(proposal.tokens).tolist()
        offered = [
            count - (count > 0 and row[count - 1] < context.stop_below)
            for count, row in zip(proposal.offered, probs, strict=True)
        ]
        self.inner.drafted = offered
        most = max(offered)
        return Proposal.chains(proposal.tokens[:, :most], offered, proposal.q.narrow(0, most))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def drop(strategy: Strategy) -> Strategy:
    """Plant the fault."""
    faulty: Any = Dropping(strategy.drafter)
    return replace(strategy, drafter=faulty)


def continuations(spec: str, alter: Any = None) -> ChiSquaredResult:
    """Judge 4,000 whole continuations against the exact law; the numbers were fixed beforehand."""
    target = build("llama", vocab_size=VOCAB, head=0.3)
    engine = engine_for(target, noise=0.4, rows=250)
    engine.open(spec, alter=alter)
    tables = []
    lengths: set[int] = set()
    for number, prompt in enumerate(LAW_PROMPTS):
        offered = [
            replace(request, sampling=replace(request.sampling, seed=SEED + number * DRAWS + request.id))
            for request in requests([prompt] * DRAWS, temperature=1.0, max_new_tokens=HORIZON)
        ]
        served = collect(engine.serve(Schedule(tuple(offered), concurrency=250, share_prefill=True)))
        lengths |= {entry.drafted for entry in served.rounds}
        law = Oracle(copied(target, "sdpa"), SamplingParams(max_new_tokens=HORIZON)).continuation_law(
            prompt, HORIZON, floor=10 / DRAWS
        )
        tables.append((law, [tuple(output) for output in served.outputs]))
    assert lengths == {0, 1, 2, 3}
    return judge(tables, alpha=ALPHA, generator=np.random.default_rng(SEED))


def test_a_stop_that_keeps_its_token_keeps_the_law() -> None:
    """Drafts that end with an unlikely token leave the target's law alone."""
    result = continuations(STOP)
    assert result.out_of_support == 0
    assert result.is_rejected is False, (result.p_value, result.tv_observed)


def test_a_stop_that_drops_its_token_is_caught() -> None:
    """The same draws with the token taken back fail the same test."""
    result = continuations(STOP, alter=drop)
    assert result.is_rejected is True, (result.p_value, result.tv_observed)


@pytest.mark.parametrize("strategy", ["draft:k=5,policy=ema", "ngram:k=5,min=1,policy=ema"])
def test_the_audit_sees_drafts_of_every_length(strategy: str) -> None:
    """With 128 rows `ema` drafts nothing; the audit asks for as few at a time as it drafts with."""
    model = build("llama", vocab_size=8, head=0.3)
    engine = engine_for(model, noise=0.1, rows=128)
    oracle = Oracle(copied(model, "sdpa"), check.sampling(8))
    planned = check.plan(oracle, [(1, 2, 3, 1, 2, 3, 1)], max_draft=5, alpha=0.5)
    short = replace(planned, draws=(128,))
    lengths: list[int] = []

    class Watching:
        rows = 128
        strategy = None

        def serve(self, schedule: Schedule) -> Iterator[Any]:
            for event in engine.serve(schedule):
                lengths.extend(entry.draft_depth for entry in getattr(event, "rounds", ()) if entry.round)
                yield event

    engine.open(strategy)
    watching: Any = Watching()
    assert check.draw(watching, [(1, 2, 3, 1, 2, 3, 1)], short, seed=1).drafted == 0
    lengths.clear()
    watching.strategy = engine.strategy
    drawn = check.draw(watching, [(1, 2, 3, 1, 2, 3, 1)], short, seed=1)
    assert drawn.accepted > 100
    assert {1, 3, 5} <= set(lengths)
