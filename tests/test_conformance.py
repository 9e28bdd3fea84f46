"""One suite for every strategy, found by name, so that a new file is tested before its author writes a test.

A strategy is built from its own `Options`: what is listed in `SMALL` is set to fit tiny models, every value
of `verify` is tried, and every `policy` with the default of `verify`; all else has its default.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import types
import typing
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import CONTEXT, VOCAB, Served, build, collect, copied, greedy, perturbed, requests, shared

from specbench import registry
from specbench.audit.chi_squared import judge
from specbench.audit.reference import Oracle
from specbench.decoding.verification import RULES, Proposal
from specbench.engines.local import LocalEngine
from specbench.errors import IncompatibleError
from specbench.policies.ema import Ema
from specbench.records import Request, SamplingParams, Schedule
from specbench.runtime.protocols import BatchView, DraftContext, StepView, Strategy

K = 3
SMALL = {"k": K, "layers": 2, "min": 1}
"""Options that are set where a strategy has them."""

POLICIES = {
    "ema": "ema(alpha=0.5,warmup=1,interval=1,tiers=1:0-1-3)",
    "confidence": "confidence(threshold=0.3)",
}
"""How policies are written where their defaults would not change a length within a few steps."""


TREES = {
    "draft": ("topk=2,depth=3", "topk=3,depth=3,nodes=7"),
    "suffix": ("k=3,nodes=6,factor=4,min_prob=0.01",),
}
"""How strategies are asked for trees."""


def specs() -> list[str]:
    """Return every strategy with every rule and every policy, as users would write it."""
    found = []
    for name in registry.names("strategy"):
        options = registry.module("strategy", name).Options
        hints = typing.get_type_hints(options)
        known = {field.name: field.default for field in dataclasses.fields(options)}
        small = [f"{key}={value}" for key, value in SMALL.items() if key in known]
        for rule in typing.get_args(hints["verify"]) if "verify" in known else (None,):
            chosen = [*small, *([f"verify={rule}"] if rule else [])]
            found.append(f"{name}:{','.join(chosen)}" if chosen else name)
        if "policy" in known:
            for policy in sorted(set(registry.names("policy")) - {known["policy"]}):
                chosen = [*small, f"policy={POLICIES.get(policy, policy)}", f"verify={known['verify']}"]
                found.append(f"{name}:{','.join(chosen)}")
        for tree in TREES.get(name, ()):
            found += [f"{name}:{tree},verify={rule}" for rule in RULES if RULES[rule].judges_trees]
    return found


SPECS = specs()
every = pytest.mark.parametrize("spec", SPECS)

PROMPTS = (
    (3, 1, 4, 1, 5, 9, 2, 6, 5, 3),
    (2,),
    (7, 7, 8, 9, 3, 7, 7, 8, 9, 3, 7, 7),
    (16, 0, 16),
    (0,),
    tuple((5 * i) % VOCAB for i in range(21)),
    (4, 4, 4, 4, 4, 4),
)


def engine_for(model: Any, *, eos: tuple[int, ...] = (), rows: int = 8, noise: float = 0.1) -> LocalEngine:
    """Return an engine whose draft model resembles its target."""
    draft = perturbed(model, noise)
    return LocalEngine(copied(model, "sdpa"), eos_ids=eos, draft=draft, rows=rows, width=CONTEXT)


@pytest.fixture(scope="module")
def opened() -> LocalEngine:
    """One engine for all tests that do not change it: strategies must not remember earlier schedules."""
    return engine_for(shared("llama"))


def serve(engine: LocalEngine, spec: str, offered: Any, *, alter: Any = None, **schedule: Any) -> Served:
    """Open a strategy and serve requests, 4 at a time unless told otherwise."""
    engine.open(spec, alter=alter)
    return collect(engine.serve(Schedule(tuple(offered), **{"concurrency": 4, **schedule})))


def strategy_of(engine: LocalEngine, spec: str) -> Strategy:
    """Return the strategy behind a name; tests of what only a lossless one promises skip the others."""
    engine.open(spec)
    assert engine.strategy is not None
    if not engine.strategy.lossless:
        pytest.skip("declared lossy")
    return engine.strategy


def skip_if_neighbours_set_the_length(engine: LocalEngine, spec: str) -> None:
    """Skip a test in which sampled tokens must be the same ones in another batch.

    A policy that learns from the whole batch drafts other lengths beside other requests. Under rejection
    sampling that uses other random numbers: the law is the same, the tokens are not.
    """
    strategy = strategy_of(engine, spec)
    if isinstance(strategy.policy, Ema) and strategy.rule.name != "exact":
        pytest.skip("the batch sets the draft length")


@every
def test_greedy_output_is_the_oracles(spec: str, opened: LocalEngine) -> None:
    """At temperature 0 a ragged batch gives the argmax of plain uncached forwards, token by token."""
    strategy_of(opened, spec)
    served = serve(opened, spec, requests(PROMPTS, temperature=0.0, max_new_tokens=24))
    assert served.outputs == [greedy(shared("llama"), prompt, 24) for prompt in PROMPTS]


@every
@pytest.mark.parametrize("family", ["gpt2", "qwen2-window", "mistral-window", "gemma2"])
def test_greedy_output_on_other_families(spec: str, family: str) -> None:
    """Learned positions, sliding windows and softcaps change nothing about that."""
    engine = LocalEngine(
        copied(shared(family), "eager" if family == "gemma2" else "sdpa"),
        eos_ids=(),
        draft=perturbed(shared(family), 0.1),
        rows=4,
        width=CONTEXT,
    )
    strategy_of(engine, spec)
    served = serve(engine, spec, requests(PROMPTS, temperature=0.0, max_new_tokens=14))
    assert served.outputs == [greedy(shared(family), prompt, 14) for prompt in PROMPTS]


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 4},
    {"temperature": 1.0, "min_p": 0.05},
)


def unlike_requests(max_new_tokens: int = 16) -> list[Request]:
    """Return requests whose parameters, lengths and seeds all differ."""
    return [
        Request(
            i,
            prompt,
            SamplingParams(**{"seed": 31 * i, "max_new_tokens": max_new_tokens, **KINDS[i % len(KINDS)]}),
            f"p{i}",
        )
        for i, prompt in enumerate(PROMPTS)
    ]


@every
def test_exact_match_is_ordinary_decoding_token_for_token(spec: str, opened: LocalEngine) -> None:
    """Verified by exact match, a strategy emits under one seed what ordinary decoding emits."""
    if strategy_of(opened, spec).rule.name != "exact":
        pytest.skip("another rule")
    ordinary = serve(opened, "ordinary", unlike_requests())
    assert serve(opened, spec, unlike_requests()).outputs == ordinary.outputs


@every
def test_a_request_does_not_depend_on_its_neighbours(spec: str, opened: LocalEngine) -> None:
    """A request alone emits what it emits in a batch with other prompts, parameters and seeds."""
    skip_if_neighbours_set_the_length(opened, spec)
    together = serve(opened, spec, unlike_requests(), concurrency=7)
    two_by_two = serve(opened, spec, unlike_requests()[::-1], concurrency=2)
    alone = [serve(opened, spec, [request]).outputs[0] for request in unlike_requests()]
    assert together.outputs == alone
    assert two_by_two.outputs == alone


@every
def test_the_seed_decides_the_output(spec: str, opened: LocalEngine) -> None:
    """The same seed gives the same output, another seed another one."""
    prompt = PROMPTS[0]

    def sample(seed: int) -> list[int]:
        return serve(opened, spec, requests([prompt], temperature=1.0, seed=seed, max_new_tokens=20)).outputs[
            0
        ]

    assert sample(1) == sample(1)
    assert len({tuple(sample(seed)) for seed in range(5)}) == 5


DRAWS = 2000
DRAW_SEED = 12_345
ALPHA = 1e-3
TINY_VOCAB = 8
BRANCHES = ((1, 2, 3, 1, 2, 3, 1), (5,))


@pytest.fixture(scope="module")
def tiny_engine() -> LocalEngine:
    """An engine over a vocabulary so small that whole continuations repeat."""
    return engine_for(build("llama", vocab_size=TINY_VOCAB, head=0.3), rows=250, noise=0.3)


@every
def test_whole_continuations_follow_the_targets_law(spec: str, tiny_engine: LocalEngine) -> None:
    """4,000 continuations of k + 3 tokens at temperature 1 pass a chi-squared test against the exact law.

    The number of draws, the seeds and the level were fixed beforehand. A strategy that drafts has drafts
    rejected at once, accepted in part and accepted in full, so each branch of verification was tested.
    """
    strategy = strategy_of(tiny_engine, spec)
    horizon = strategy.max_draft + 3
    model = copied(build("llama", vocab_size=TINY_VOCAB, head=0.3), "sdpa")
    tables = []
    rounds = []
    for number, prompt in enumerate(BRANCHES):
        offered = [
            Request(i, prompt, SamplingParams(seed=DRAW_SEED + number * DRAWS + i, max_new_tokens=horizon))
            for i in range(DRAWS)
        ]
        served = serve(tiny_engine, spec, offered, concurrency=250, share_prefill=True)
        law = Oracle(model, SamplingParams(max_new_tokens=horizon)).continuation_law(
            prompt, horizon, floor=10 / DRAWS
        )
        tables.append((law, [tuple(output) for output in served.outputs]))
        rounds += [entry for entry in served.rounds if entry.draft_depth == strategy.max_draft > 0]
    result = judge(tables, alpha=ALPHA, generator=np.random.default_rng(DRAW_SEED))
    assert result.out_of_support == 0
    assert result.is_rejected is False, (result.p_value, result.tv_observed)
    assert result.smallest_detectable_tv is not None
    assert result.smallest_detectable_tv < 0.15
    if strategy.drafter is not None:
        kinds = {(entry.accepted == 0, entry.rejected) for entry in rounds}
        assert {(True, True), (False, True), (False, False)} <= kinds


@every
@pytest.mark.parametrize("kind", ["eos", "stop"])
def test_what_ends_a_request_ends_it_at_once(spec: str, kind: str) -> None:
    """With EOS or a stop id the output is that without, cut after its first occurrence, also in mid-run."""
    skip_if_neighbours_set_the_length(engine_for(shared("llama")), spec)
    ends = (4, 9)
    free = serve(engine_for(shared("llama")), spec, unlike_requests(24))
    if kind == "eos":
        ended = serve(engine_for(shared("llama"), eos=ends), spec, unlike_requests(24))
    else:
        offered = [replace(r, sampling=replace(r.sampling, stop_token_ids=ends)) for r in unlike_requests(24)]
        ended = serve(engine_for(shared("llama")), spec, offered)
    cut = 0
    for output, reason, whole in zip(ended.outputs, ended.reasons, free.outputs, strict=True):
        place = next((i for i, token in enumerate(whole) if token in ends), None)
        assert output == (whole if place is None else whole[: place + 1])
        assert reason == ("length" if place is None else kind)
        cut += place is not None
    assert cut >= 3


@every
@pytest.mark.parametrize("budget", [0, 1, 2, K, K + 1, K + 2])
def test_budgets_are_met_exactly(spec: str, budget: int, opened: LocalEngine) -> None:
    """Exactly the budget is emitted, greedily the oracle's tokens; with none, nothing is even prefilled."""
    strategy_of(opened, spec)
    served = serve(opened, spec, requests(PROMPTS, temperature=0.0, max_new_tokens=budget))
    assert served.outputs == [greedy(shared("llama"), prompt, budget) for prompt in PROMPTS]
    assert set(served.reasons) == {"length"}
    assert bool(served.steps) == (budget > 0)
    sampled = serve(opened, spec, requests(PROMPTS, temperature=1.0, max_new_tokens=budget))
    assert {len(output) for output in sampled.outputs} == {budget}


@every
def test_a_prompt_of_one_token(spec: str, opened: LocalEngine) -> None:
    """Every one-token prompt decodes greedily as the oracle says, alone in its batch."""
    strategy_of(opened, spec)
    for token in range(0, VOCAB, 4):
        served = serve(opened, spec, requests([(token,)], temperature=0.0, max_new_tokens=8))
        assert served.outputs == [greedy(shared("llama"), (token,), 8)]


@every
def test_the_end_of_the_context(spec: str, opened: LocalEngine) -> None:
    """A request ends where the context ends, with the oracle's tokens up to there."""
    strategy_of(opened, spec)
    prompt = tuple((3 * i) % VOCAB for i in range(CONTEXT - 7))
    served = serve(opened, spec, requests([prompt, (1,)], temperature=0.0, max_new_tokens=20))
    assert served.outputs[0] == greedy(shared("llama"), prompt, 7)
    assert served.reasons == ["context", "length"]


class Sometimes:
    """A length policy that lets rows draft in some steps only, each row in its own rhythm."""

    stop_below = 0.0
    lively_batch = None

    def __init__(self, most: int) -> None:
        self.max_length = most
        self.step = 0

    def reset(self) -> None:
        """Begin the rhythm again."""
        self.step = 0

    def choose(self, view: BatchView) -> list[int]:
        """Return 0 or more for each row."""
        self.step += 1
        return [(self.step * (row + 2)) % (self.max_length + 1) for row in range(len(view.contexts))]

    def observe(self, step: StepView) -> None:
        """Check what a policy is told."""
        assert all(0 <= a <= d <= self.max_length for a, d in zip(step.accepted, step.drafted, strict=True))


@every
def test_steps_without_a_draft_leave_nothing_behind(spec: str, opened: LocalEngine) -> None:
    """If rows draft in some steps and not in others, greedy output stays the oracle's."""
    most = strategy_of(opened, spec).max_draft
    served = serve(
        opened,
        spec,
        requests(PROMPTS, temperature=0.0, max_new_tokens=24),
        alter=lambda strategy: replace(strategy, policy=Sometimes(most)),
    )
    assert served.outputs == [greedy(shared("llama"), prompt, 24) for prompt in PROMPTS]
    if most:
        assert {0} < {entry.drafted for entry in served.rounds if entry.round}


class Shy:
    """A drafter that offers nothing at all, or stops short of what it was allowed."""

    def __init__(self, inner: Any, most: int) -> None:
        self.inner, self.most = inner, most

    def propose(self, context: DraftContext) -> Proposal:
        """Offer less."""
        if self.most == 0:
            return Proposal.empty(len(context.tokens))
        limits = [min(limit, self.most) for limit in context.limits]
        return self.inner.propose(replace(context, limits=limits))  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@every
@pytest.mark.parametrize("most", [0, 1])
def test_an_empty_or_short_draft_is_fine(spec: str, most: int, opened: LocalEngine) -> None:
    """A drafter that offers nothing makes ordinary decoding; one that offers less than asked is believed."""
    strategy = strategy_of(opened, spec)
    if strategy.drafter is None:
        pytest.skip("never drafts")
    shy = replace(strategy, drafter=Shy(strategy.drafter, most))
    served = serve(opened, spec, requests(PROMPTS, temperature=0.0, max_new_tokens=12), alter=lambda _: shy)
    assert served.outputs == [greedy(shared("llama"), prompt, 12) for prompt in PROMPTS]
    assert {entry.draft_depth for entry in served.rounds} <= set(range(most + 1))
    if most == 0:
        assert all(step.tokens_in == step.batch for step in served.steps if step.phase == "decode")


@every
def test_what_is_claimed_is_kept(spec: str, opened: LocalEngine) -> None:
    """The name is what was typed, no draft is deeper than `max_draft` or larger than the lookahead."""
    described = opened.open(spec)
    assert described.name == spec
    served = serve(opened, spec, requests(PROMPTS, max_new_tokens=20), record_drafts=True)
    assert max(entry.draft_depth for entry in served.rounds) <= described.max_draft
    assert max(entry.drafted for entry in served.rounds) <= opened.memory().lookahead_tokens
    assert opened.strategy is not None
    assert opened.memory().lookahead_tokens == max(described.max_draft, opened.strategy.max_nodes)
    for entry in served.rounds:
        assert all(0 <= token < VOCAB for token in entry.draft_tokens or ())


def test_every_strategy_is_here() -> None:
    """The suite covers all files of the package, each with all its rules."""
    assert {spec.partition(":")[0] for spec in SPECS} == set(registry.names("strategy"))
    assert "ordinary" in SPECS
    for name in ("draft", "ngram", "early-exit"):
        mine = [spec for spec in SPECS if spec.startswith(f"{name}:")]
        assert {spec.rpartition("verify=")[2] for spec in mine if "verify=" in spec} == set(RULES)
        policies = {spec.partition("policy=")[2].partition("(")[0] for spec in mine} - {""}
        assert policies == set(registry.names("policy")) - {"fixed"}


def test_a_new_strategy_is_found_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy that another package adds is in the suite, with its own options set to fit tiny models."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        layers: int = 12
        depth: int = 5
        verify: typing.Literal["rejection", "tree"] = "rejection"

    module = types.ModuleType("somewhere")
    module.Options = Options  # type: ignore[attr-defined]

    class Point:
        name = "brand-new"

        def load(self) -> types.ModuleType:
            return module

    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [Point()] if group.endswith("strategies") else []
    )
    assert set(specs()) - set(SPECS) == {
        "brand-new:layers=2,verify=rejection",
        "brand-new:layers=2,verify=tree",
    }


# Early exit, which drafts with the target itself


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral-window"])
def test_early_exit_through_all_layers_is_always_right(family: str, temperature: float) -> None:
    """With every layer the draft is the target: every token is accepted, k + 1 a step."""
    engine = engine_for(shared(family))
    offered = requests(PROMPTS, temperature=temperature, max_new_tokens=21)
    served = serve(engine, "early-exit:layers=3,k=4", offered)
    decode = [entry for entry in served.rounds if entry.round]
    assert len(decode) == 4 * len(PROMPTS)  # 21 = 1 + 4 * 5
    assert all((entry.drafted, entry.accepted, entry.rejected) == (4, 4, False) for entry in decode)


def test_more_layers_than_there_are(opened: LocalEngine) -> None:
    """Asking for a fourth layer of three is an error that says how many there are."""
    with pytest.raises(IncompatibleError, match="wants 4 layers; the target has 3") as caught:
        opened.open("early-exit:layers=4")
    assert "at most 3" in (caught.value.hint or "")


@pytest.mark.parametrize("options", ["layers=0", "k=0", "layers=-1"])
def test_early_exit_of_nothing_is_refused(options: str, opened: LocalEngine) -> None:
    """No layer or no draft token is refused."""
    with pytest.raises(registry.UsageError, match="at least 1"):
        opened.open(f"early-exit:{options}")


def test_early_exit_leaves_the_model_whole(opened: LocalEngine) -> None:
    """After decoding with its first layers the model's plain forward is what it was."""
    model = opened.runner.model
    tokens: Sequence[int] = PROMPTS[0]
    with torch.inference_mode():
        before = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        serve(opened, "early-exit:layers=1,k=2", requests(PROMPTS, max_new_tokens=6))
        after = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
    torch.testing.assert_close(before, after, atol=0, rtol=0)
