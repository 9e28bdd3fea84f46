"""The catalogue of injected faults: complete, harmless where it does not apply, and loud where it says.

Every fault is planted in the real loop on tiny random models, or in the toy where its exact law is known.
Numbers of draws, seeds and levels were fixed beforehand; most checks need neither, for under exact match a
strategy repeats ordinary decoding token by token, and what does not is broken.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tiny_models import CONTEXT, VOCAB, build, copied, greedy, perturbed, requests, shared, uncached
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specbench import registry
from specbench.audit import contracts, logprob_check, record_checks
from specbench.audit.acceptance import TokenAcceptance
from specbench.audit.chi_squared import judge
from specbench.audit.collisions import Collisions
from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._drafters import WrappedDrafter, plant
from specbench.audit.proposals import Proposals
from specbench.audit.reference import Oracle
from specbench.cli import main
from specbench.decoding.distribution import Distribution
from specbench.decoding.random_numbers import Purpose
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.engines.local import LocalEngine
from specbench.metrics import identities
from specbench.policies.fixed import Fixed
from specbench.records import (
    CellKey,
    CellRecords,
    Request,
    RequestRecord,
    RoundRecord,
    SamplingParams,
    Schedule,
    Serving,
    StepRecord,
)
from specbench.runtime.events import Finished, Stepped
from specbench.runtime.grammar import GrammarCompiler
from specbench.runtime.loop import Row, StepLoop
from specbench.runtime.protocols import DraftContext, Drafter, Strategy
from tests.toy import Toy, chain_rounds, histories, number_of, ordinary_law, total_variation

NAMES = registry.names("fault")
REGIMES = ("self", "good", "bad")
CHAIN, EXACT = "draft:k=3", "draft:k=3,verify=exact"
TREE, EXACT_TREE = "draft:topk=2,depth=3", "draft:topk=2,depth=3,verify=exact"
NGRAM, EXACT_NGRAM = "ngram:k=3,min=1", "ngram:k=3,min=1,verify=exact"
PROMPTS = (
    (3, 1, 4, 1, 5, 9, 2, 6, 5, 3),
    (2,),
    (7, 7, 8, 9, 3, 7, 7, 8, 9, 3, 7, 7),
    (16, 0, 16),
)
ALPHA = 1e-4


@functools.cache
def fault(name: str) -> ModuleType:
    return registry.module("fault", name)


# Serving with a fault


@functools.cache
def engine(eos: tuple[int, ...] = (), noise: float = 0.1) -> LocalEngine:
    """Return an engine over tiny models whose tokens are letters, one each, but for token 0."""
    target = copied(shared("llama"), "sdpa")
    draft = perturbed(shared("llama"), noise)
    return LocalEngine(target, eos_ids=eos, draft=draft, tokenizer=letters(), rows=8, width=CONTEXT)


@functools.cache
def letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token 1 is a, token 2 is b, and so on; token 0 is special."""
    alphabet = bytes_to_unicode()
    names = ["<eos>", *(alphabet[97 + i] for i in range(VOCAB - 1))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


class Served:
    """What a schedule left, without a look at whether it makes sense."""

    def __init__(self, opened: LocalEngine, offered: Sequence[Request], **schedule: Any) -> None:
        records: dict[int, RequestRecord] = {}
        self.eos_ids = opened.eos_ids
        self.steps: list[StepRecord] = []
        self.rounds: list[RoundRecord] = []
        for event in opened.serve(Schedule(tuple(offered), **{"concurrency": 8, **schedule})):
            if isinstance(event, Finished):
                records[event.record.request] = event.record
            elif isinstance(event, Stepped):
                self.steps.append(event.step)
                self.rounds.extend(event.rounds)
        self.records = [records[key] for key in sorted(records)]

    @property
    def outputs(self) -> list[list[int]]:
        return [list(record.output_tokens) for record in self.records]

    @property
    def acceptance(self) -> float:
        return sum(r.accepted for r in self.rounds) / sum(r.drafted for r in self.rounds)

    def violations(self) -> list[str]:
        """Return what the identities of METRICS.md object to, and what an audit does besides."""
        rounds = {
            record.request: [entry for entry in self.rounds if entry.request == record.request]
            for record in self.records
        }
        records = {record.request: record for record in self.records}
        found = record_checks.contradictions(self.steps, rounds, records, self.eos_ids)
        return [*self.broken_identities(), *found]

    def broken_identities(self) -> list[str]:
        key = CellKey("tiny", 1.0, "c=8", "any")
        finished = max(record.finished for record in self.records)
        serving = Serving(key, 0, 0, tuple(self.steps), tuple(self.rounds), tuple(self.records), finished)
        return identities.check(CellRecords(key, (serving,)))


def served(
    name: str | None,
    spec: str,
    offered: Sequence[Request],
    opened: LocalEngine | None = None,
    **schedule: Any,
) -> Served:
    """Serve requests with a fault planted, or without one."""
    opened = opened or engine()
    opened.open(spec, alter=fault(name).alter if name else None)
    return Served(opened, offered, **schedule)


def strategy_of(spec: str) -> Strategy:
    opened = engine()
    opened.open(spec)
    assert opened.strategy is not None
    return opened.strategy


# The catalogue


def test_there_are_enough_and_every_class_is_there() -> None:
    """Every class has its faults, 100 or more in all."""
    assert len(NAMES) >= 100
    assert {fault(name).CLASS for name in NAMES} == set(get_args(FaultClass))


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_says_what_it_is(name: str) -> None:
    """It has a sentence and a paragraph, its class, and where it shows; if nowhere, it says what it costs."""
    module = fault(name)
    assert module.__doc__ is not None
    summary, _, rest = module.__doc__.partition("\n\n")
    assert summary.endswith(".")
    assert rest.strip()
    assert module.CLASS in get_args(FaultClass)
    assert set(module.SHOWS) <= set(get_args(Shows))
    assert module.SHOWS or "only acceptance suffers" in " ".join(rest.lower().split())


def test_faults_are_listed_by_class(capsys: pytest.CaptureFixture[str]) -> None:
    """`list faults` shows each class once, with its faults under it."""
    assert main(["list", "faults"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line.removesuffix(":") for line in lines if line and not line.startswith(" ")]
    assert heads == list(get_args(FaultClass))
    assert main(["list", "faults", "--json"]) == 0
    for entry in json.loads(capsys.readouterr().out):
        assert entry["class"] == fault(entry["name"]).CLASS


@pytest.mark.parametrize("name", NAMES)
def test_ordinary_decoding_is_left_alone(name: str) -> None:
    """What does not draft comes back as it was."""
    ordinary = strategy_of("ordinary")
    assert fault(name).alter(ordinary) is ordinary


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_keeps_what_a_strategy_claims(name: str) -> None:
    """Name, claim and longest draft stay, and the strategy that was altered stays what it was."""
    for spec in (CHAIN, TREE, NGRAM):
        strategy = strategy_of(spec)
        parts = (strategy.rule, strategy.drafter, strategy.policy, strategy.loop)
        altered = fault(name).alter(strategy)
        assert (altered.name, altered.lossless, altered.max_draft) == (spec, True, strategy.max_draft)
        assert (strategy.rule, strategy.drafter, strategy.policy, strategy.loop) == parts


def test_faults_of_trees_leave_chains_alone() -> None:
    """And those of chains trees."""
    for name in ("sampled-tree-pruned", "tree-path-not-compacted"):
        assert fault(name).alter(strategy_of(CHAIN)) is strategy_of(CHAIN)
        assert fault(name).alter(strategy_of(TREE)) is not strategy_of(TREE)
    for name in ("draft-shifted", "unlikely-draft-token-dropped", "greedy-draft-claims-softmax"):
        assert fault(name).alter(strategy_of(TREE)) is strategy_of(TREE)


SPECS = (CHAIN, EXACT, TREE, NGRAM, "early-exit:layers=2,k=3", "draft:k=3,verify=block", "suffix:k=3")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_fault_crashes_anything(name: str) -> None:
    """Every strategy serves unlike requests to their end, up to the end of the context."""
    long = tuple((3 * i) % VOCAB for i in range(CONTEXT - 6))
    offered = [
        replace(request, sampling=replace(request.sampling, temperature=[1.0, 0.0][request.id % 2]))
        for request in requests(
            (*PROMPTS, long), max_new_tokens=9, logprobs=1, repetition_penalty=1.2, top_p=0.9, top_k=6
        )
    ]
    for spec in SPECS:
        assert len(served(name, spec, offered).records) == len(offered)
        plain = requests(PROMPTS[:2], temperature=0.0, max_new_tokens=5)
        assert len(served(name, spec, plain).records) == len(plain)


# The law of what faulty rules emit, on the toy

TARGET = Toy.random(3, seed=2, spread=1.5)
DRAFTS = {"self": TARGET, "good": TARGET.blurred(1.2, seed=52), "bad": Toy(-1.5 * TARGET.logits)}
RULES = [
    "accept-above-threshold",
    "accept-all",
    "accept-if-p-at-least-q",
    "accept-joint-ratio",
    "accept-ratio-inverted",
    "accept-ratio-lowered",
    "accept-ratio-raised",
    "accept-without-q",
    "accepts-too-often",
    "coin-always-zero",
    "coin-reused-in-round",
    "residual-absolute",
    "residual-argmax",
    "residual-from-next-q",
    "residual-from-p",
    "residual-from-q",
    "residual-row-zeroed",
    "residual-without-draft",
    "bonus-argmax",
    "bonus-from-previous-row",
    "bonus-from-q",
]


def rule_of(name: str) -> RejectionSampling:
    strategy = Strategy("toy", None, RejectionSampling(), Fixed(2), lossless=True)
    rule = fault(name).alter(strategy).rule
    assert isinstance(rule, RejectionSampling)
    return rule


COINS = {1: 400, 2: 150}
"""How many coins stand for all, for each of k drafted tokens."""


def drafted_by(name: str) -> int:
    """Return how many tokens to draft: two where a fault ties one to another."""
    return 2 if name in ("accept-joint-ratio", "coin-reused-in-round", "residual-from-next-q") else 1


def grid_law(rule: RejectionSampling, draft: Toy, k: int, drawn: Tensor | None = None) -> Tensor:
    """Return the law of 3 tokens `[9, 27]`, k drafted a round, over a grid of coins.

    `drawn` `[3, 3, 3]` are the laws that drafts come from where they are not the draft's.
    """
    vocab, coins = 3, COINS[k]
    tokens = histories(vocab, k)
    p = TARGET.probs[tokens[:, :-1], tokens[:, 1:]]
    q = draft.probs[tokens[:, :-1], tokens[:, 1:]][:, :k]
    true = q if drawn is None else drawn[tokens[:, :-1], tokens[:, 1:]][:, :k]
    weight = true.gather(-1, tokens[:, 2:, None]).prod(1) / coins**k
    axis = (torch.arange(coins, dtype=torch.float64) + 0.5) / coins
    thrown = torch.cartesian_prod(*[axis] * k).reshape(-1, k)
    repeated = [each.repeat_interleave(len(thrown), 0) for each in (p, q, tokens)]
    target, offered, texts = Distribution.dense(repeated[0]), Distribution.dense(repeated[1]), repeated[2]
    proposal = Proposal.chains(texts[:, 2:], [k] * len(texts), offered)
    accepted, rejected = rule.decide(target, proposal, thrown.repeat(len(tokens), 1))
    law = rule.next_law(target, proposal, accepted, rejected).normalised().to_dense(vocab, torch.float64)
    law = law * weight.repeat_interleave(len(thrown), 0)
    emitted = []
    for n in range(k + 1):
        here = accepted == n
        part = torch.zeros(vocab ** (2 + n), vocab, dtype=torch.float64)
        part.index_add_(0, number_of(texts[here, : 2 + n], vocab), law[here])
        emitted.append(part.reshape(vocab**2, -1))
    return chain_rounds(emitted, 3)


LEAST = 0.015
"""The least mean distance of a fault that is to be noticed; the grid itself is off by less than a third."""


@pytest.mark.parametrize("k", COINS)
@pytest.mark.parametrize("regime", DRAFTS)
def test_the_grid_finds_nothing_wrong_with_the_right_rule(regime: str, k: int) -> None:
    """Rejection sampling over a grid of coins emits the target's law, to within the grid."""
    law = grid_law(RejectionSampling(), DRAFTS[regime], k)
    assert total_variation(law, ordinary_law(TARGET.probs, 3)).mean() < LEAST / 3


@pytest.mark.parametrize("name", RULES)
def test_the_law_of_a_faulty_rule_is_wrong_where_it_shows(name: str) -> None:
    """In each regime that a fault names, the law of what it emits is another one; in `self`, only then."""
    law = ordinary_law(TARGET.probs, 3)
    rule, shows = rule_of(name), fault(name).SHOWS
    for regime, draft in DRAFTS.items():
        distance = float(total_variation(grid_law(rule, draft, drafted_by(name)), law).mean())
        if regime in shows:
            assert distance > LEAST, regime
        elif regime == "self":
            assert distance < LEAST / 3


BENT = ["greedy-draft-claims-softmax", "draft-cooler-than-q", "draft-truncated-q-whole"]


@pytest.mark.parametrize("regime", DRAFTS)
@pytest.mark.parametrize("name", BENT)
def test_a_false_q_changes_the_law_under_every_draft(name: str, regime: str) -> None:
    """Drafts of one law that claim another one lead to the wrong law, equal to the target or not."""
    draft = DRAFTS[regime]
    drawn = fault(name).alter(strategy_of(CHAIN)).drafter.bend(draft.logits).softmax(-1)
    law = grid_law(RejectionSampling(), draft, 1, drawn)
    assert float(total_variation(law, ordinary_law(TARGET.probs, 3)).mean()) > LEAST


# Random numbers used twice

P, Q = torch.tensor([0.35, 0.1, 0.35, 0.2]), torch.tensor([0.1, 0.4, 0.1, 0.4])
NUMBERS = ("draft-number-reused-for-residual", "draft-number-reused-for-coin")


def one_token(name: str | None, draws: int = 20_000) -> Tensor:
    """Return the shares of the first tokens of many rounds, under the random numbers of a loop."""
    strategy = strategy_of(CHAIN)
    loop_class = fault(name).alter(strategy).loop if name else StepLoop
    loop = loop_class(engine().runner, strategy, rows=draws, eos_ids=())
    loop.active = [
        Row(request, 0.0, 0.0, [*request.prompt, 1], 9, False, frozenset(), frozenset(), round=1)
        for request in (Request(i, (2,), SamplingParams(seed=i)) for i in range(draws))
    ]
    random = loop.random(loop.active)
    law = Distribution.dense(Q.expand(draws, 1, -1))
    drafted = law.sample(random.uniform(Purpose.DRAFT, 1))
    proposal = Proposal.chains(drafted, [1] * draws, law)
    decided = RejectionSampling().verify(Distribution.dense(P.expand(draws, 2, -1)), proposal, random)
    emitted = torch.where(decided.accepted > 0, drafted[:, 0], decided.next_token)
    return torch.bincount(emitted, minlength=len(P)) / draws


def test_numbers_used_once_give_the_targets_law() -> None:
    """20,000 first tokens under the right numbers are within .01 of p."""
    assert float((one_token(None) - P).abs().sum()) / 2 < 0.01


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_used_twice_give_another_law(name: str) -> None:
    """20,000 first tokens under reused numbers are more than .02 from p."""
    assert float((one_token(name) - P).abs().sum()) / 2 > 0.02


# Token by token, under exact match

WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "rejected-entries-visible": (EXACT, {}),
    "rolled-back-too-far": (EXACT, {}),
    "positions-not-rolled-back": (EXACT, {}),
    "state-stale-after-idle-step": (EXACT_NGRAM, {}),
    "tree-path-not-compacted": (EXACT_TREE, {}),
    "tree-mask-sees-siblings": (EXACT_TREE, {}),
    "acceptance-of-previous-step": (EXACT, {}),
    "nan-wins-argmax": (EXACT, {"temperature": 0.0}),
    "temperature-on-bonus-only": (EXACT, {"temperature": 0.5}),
    "temperature-on-draft-only": (EXACT, {"temperature": 0.5}),
    "temperature-twice": (EXACT, {"temperature": 0.5}),
    "top-k-on-bonus-only": (EXACT, {"top_k": 2}),
    "top-p-on-bonus-only": (EXACT, {"top_p": 0.5}),
    "top-p-on-draft-only": (EXACT, {"top_p": 0.5}),
    "top-p-twice": (EXACT, {"top_p": 0.8}),
    "top-p-before-top-k": (EXACT, {"top_k": 3, "top_p": 0.7}),
    "min-p-on-bonus-only": (EXACT, {"min_p": 0.4}),
    "min-p-not-scaled": (EXACT, {"min_p": 0.3}),
    "top-p-drops-crossing-token": (EXACT, {"top_p": 0.8}),
    "logit-bias-after-temperature": (EXACT, {"temperature": 0.6, "logit_bias": ((4, -2.5), (9, 2.0))}),
    "penalties-count-rejected": (EXACT, {"frequency_penalty": 1.5}),
    "repetition-penalty-on-bonus-only": (EXACT, {"repetition_penalty": 2.0}),
    "repetition-penalty-on-draft-only": (EXACT, {"repetition_penalty": 2.0}),
    "repetition-penalty-twice": (EXACT, {"repetition_penalty": 1.5}),
    "presence-penalty-on-bonus-only": (EXACT, {"presence_penalty": 2.0}),
    "presence-penalty-twice": (EXACT, {"frequency_penalty": 1.0}),
    "logit-bias-on-bonus-only": (EXACT, {"logit_bias": ((4, -100.0), (9, 2.0))}),
    "logit-bias-on-draft-only": (EXACT, {"logit_bias": ((4, -100.0), (9, 2.0))}),
    "logit-bias-twice": (EXACT, {"logit_bias": ((4, 1.0), (9, -1.5))}),
    "bad-words-on-bonus-only": (EXACT, {"bad_words": ((4,), (9, 3))}),
    "penalties-see-committed-only": (EXACT, {"frequency_penalty": 1.5}),
}
"""What changes the laws of some rows: where that shows, and under which parameters."""


def texts(sampling: dict[str, Any]) -> Any:
    return requests(PROMPTS * 2, **{"temperature": 1.0, "max_new_tokens": 24, **sampling})


@pytest.mark.parametrize("name", WHOLE)
def test_a_fault_of_laws_changes_the_text(name: str) -> None:
    """Without the fault the strategy says what ordinary decoding says, with it something else."""
    spec, sampling = WHOLE[name]
    ordinary = served(None, "ordinary", texts(sampling)).outputs
    assert served(None, spec, texts(sampling)).outputs == ordinary
    assert served(name, spec, texts(sampling)).outputs != ordinary


@pytest.mark.parametrize("name", [name for name in WHOLE if fault(name).CLASS == "parameters"])
def test_a_fault_of_parameters_needs_them(name: str) -> None:
    """Requests without the parameter are served as they should be."""
    assert served(name, EXACT, texts({})).outputs == served(None, "ordinary", texts({})).outputs


# Continuations of tiny models against their exact law

DRAWS, HORIZON, SMALL = 1500, 5, 8
LAWS = {
    "q-of-raw-logits": (CHAIN, {"top_k": 3, "temperature": 0.8}),
    "unlikely-draft-token-dropped": (CHAIN, {}),
    "sampled-tree-pruned": (TREE, {}),
    "draft-ids-off-by-one": (CHAIN, {}),
    "reseeded-every-round": (CHAIN, {}),
}
"""Other faults of the proposal and of random numbers, and where they show."""


@functools.cache
def small_engine() -> LocalEngine:
    """Return an engine over a vocabulary so small that whole continuations repeat."""
    model = build("llama", vocab_size=SMALL, head=0.3)
    return LocalEngine(
        copied(model, "sdpa"), eos_ids=(), draft=perturbed(model, 0.4), rows=250, width=CONTEXT
    )


@functools.cache
def small_law(prompt: tuple[int, ...], sampling: tuple[tuple[str, Any], ...]) -> Any:
    model = copied(build("llama", vocab_size=SMALL, head=0.3), "sdpa")
    params = SamplingParams(max_new_tokens=HORIZON, **dict(sampling))
    return Oracle(model, params).continuation_law(prompt, HORIZON, floor=10 / DRAWS)


def is_rejected(name: str | None, spec: str, sampling: dict[str, Any]) -> bool:
    """Judge 3,000 continuations of 5 tokens, of two prompts."""
    tables = []
    for number, prompt in enumerate(((1, 2, 3, 1, 2, 3, 1), (5,))):
        offered = [
            Request(
                i,
                prompt,
                SamplingParams(seed=77_000 + number * DRAWS + i, max_new_tokens=HORIZON, **sampling),
            )
            for i in range(DRAWS)
        ]
        found = served(name, spec, offered, small_engine(), concurrency=250, share_prefill=True)
        law = small_law(prompt, tuple(sampling.items()))
        tables.append((law, [tuple(output) for output in found.outputs]))
    result = judge(tables, alpha=ALPHA, generator=np.random.default_rng(5))
    return bool(result.is_rejected) or result.out_of_support > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_a_fault_of_proposals_changes_the_law(name: str) -> None:
    """3,000 continuations do not follow the target's law."""
    assert is_rejected(name, *LAWS[name])


ACCEPTANCE_ONLY = [name for name in NAMES if not fault(name).SHOWS]


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *(n for n in ACCEPTANCE_ONLY if n != "draft-shifted")])
def test_what_costs_acceptance_only_keeps_the_law(name: str | None) -> None:
    """3,000 continuations follow the target's law, as without a fault; test_gate.py has draft-shifted."""
    assert not is_rejected(name, CHAIN, {})


@pytest.mark.parametrize("name", ACCEPTANCE_ONLY)
def test_what_costs_acceptance_only_does(name: str) -> None:
    """Greedy output is the oracle's token by token, and fewer drafts are accepted at temperature 1."""
    found = served(name, CHAIN, requests(PROMPTS, temperature=0.0, max_new_tokens=40))
    assert found.outputs == [greedy(shared("llama"), prompt, 40) for prompt in PROMPTS]
    offered = requests(PROMPTS * 3, temperature=1.0, max_new_tokens=40)
    assert served(name, CHAIN, offered).acceptance < served(None, CHAIN, offered).acceptance - 0.05


# Contracts

BREAKS = {
    "bonus-over-budget": "length limits",
    "budget-overrun-by-run": "length limits",
    "text-after-eos": "EOS in an accepted run",
    "eos-missed-in-run": "EOS in an accepted run",
    "stop-ids-missed-in-run": "stop ids",
    "eos-missed-as-bonus": "EOS after an accepted run",
    "budget-checked-before-stop": "stop ids",
    "stop-string-missed-across-chunks": "stop strings",
    "stop-string-missed-in-run": "stop strings",
    "min-new-tokens-spares-stop-ids": "min new tokens",
    "min-new-tokens-ignored": "min new tokens",
    "eos-called-length": "finish reasons",
    "repetition-penalty-on-bonus-only": "repetition penalty",
    "repetition-penalty-on-draft-only": "repetition penalty",
    "repetition-penalty-twice": "repetition penalty",
    "presence-penalty-on-bonus-only": "presence penalty",
    "presence-penalty-twice": "presence penalty",
    "penalties-see-committed-only": "frequency penalty",
    "logit-bias-on-bonus-only": "logit bias",
    "logit-bias-on-draft-only": "logit bias",
    "bad-words-on-bonus-only": "bad words",
    "grammar-row-unmasked": "grammar",
    "grammar-not-rolled-back": "grammar",
    "grammar-mask-of-previous-row": "grammar",
    "drafts-kept-across-mode-switch": "grammar",
    "seed-ignored": "seeds",
    "one-stream-for-all": "distinct samples",
    "seed-of-32-bits": "every bit of a seed",
    "reseeded-every-round": "fresh numbers",
    "seed-mixed-with-request": "alone or in a batch",
    "bias-of-row-0": "neighbours",
    "ignore-eos-of-row-0": "neighbours",
    "row-0-parameters-for-all": "alone or in a batch",
    "chunks-counted-as-tokens": "usage counts",
}
GRAMMAR = "regex:([a-d][e-h][i-l]m?)+n"


def parses(tokens: Sequence[int]) -> bool:
    """Say whether tokens begin a text of the grammar, or are one."""
    matcher = GrammarCompiler(letters(), vocab_size=VOCAB, eos_ids=(0,)).matcher(GRAMMAR)
    return all(matcher.accept(token) for token in tokens)


def generate(name: str | None, spec: str, eos: tuple[int, ...]) -> contracts.Generate:
    return lambda offered: served(name, spec, offered, engine(eos)).records


def subject(name: str | None, eos: tuple[int, ...] = ()) -> contracts.Subject:
    return contracts.Subject(
        generate(name, CHAIN, eos),
        PROMPTS,
        3,
        ordinary=generate(None, "ordinary", eos),
        with_eos=lambda token: generate(name, CHAIN, (token,)),
        counter_seeds=True,
        text=lambda tokens: str(letters().decode(list(tokens))),
        grammar=GRAMMAR,
        parses=parses,
        eos_ids=eos,
    )


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_contract_is_noticed(name: str) -> None:
    """The contract that the fault breaks is found broken."""
    contract = BREAKS[name]
    eos = (0,) if contract == "grammar" else ()
    (result,) = contracts.check(subject(name, eos), [contract])
    assert result.held is False, result.words


@pytest.mark.parametrize("contract", sorted(set(BREAKS.values())))
def test_contracts_hold_without_a_fault(contract: str) -> None:
    """None of those contracts is broken by the decoder that the faults are planted in."""
    eos = (0,) if contract == "grammar" else ()
    (result,) = contracts.check(subject(None, eos), [contract])
    assert result.held is True, result.words


# Records

CONTRADICTS = {
    "bonus-over-budget": CHAIN,
    "budget-overrun-by-run": CHAIN,
    "padding-rows-counted": CHAIN,
    "bonus-counted-as-accepted": CHAIN,
    "emitted-before-stop-check": CHAIN,
    "idle-rounds-dropped": NGRAM,
    "nothing-drafted-called-perfect": CHAIN,
    "chunks-counted-as-tokens": CHAIN,
    "drafted-counted-to-rejection": CHAIN,
    "rejected-drafts-not-counted": CHAIN,
    "eos-missed-as-bonus": CHAIN,
}


def unlike_lengths() -> list[Request]:
    """Return requests that run out of budget one after the other, and some that meet a stop id."""
    return [
        replace(
            request, sampling=replace(request.sampling, max_new_tokens=12 + request.id, stop_token_ids=(4,))
        )
        for request in requests(PROMPTS * 4, temperature=1.0)
    ]


@pytest.mark.parametrize("name", CONTRADICTS)
def test_records_contradict_themselves(name: str) -> None:
    """The identities object to the records, or what else they owe, and not to those without the fault."""
    spec, opened = CONTRADICTS[name], engine((9,))
    assert served(None, spec, unlike_lengths(), opened, record_drafts=True).violations() == []
    assert served(name, spec, unlike_lengths(), opened, record_drafts=True).violations()


def acceptance_of(name: str | None) -> TokenAcceptance:
    """Score what the rounds say was tested, by plain forwards along the text."""
    offered = requests(PROMPTS * 10, temperature=1.0, max_new_tokens=16)
    found = served(name, CHAIN, offered, record_drafts=True)
    coins = TokenAcceptance(ALPHA)
    for record in found.records:
        text = (*record.prompt_tokens, *record.output_tokens)
        p = uncached(shared("llama"), text).double().softmax(-1).numpy()[len(record.prompt_tokens) - 1 : -1]
        place = 0
        for entry in (entry for entry in found.rounds if entry.request == record.request):
            tested = min(entry.accepted + entry.rejected, len(p) - place)
            drafted, q = (entry.draft_tokens or ())[:tested], (entry.draft_probs or ())[:tested]
            outcomes = [i < entry.accepted for i in range(tested)]
            coins.add(outcomes, [p[place + i, token] for i, token in enumerate(drafted)], q)
            place += entry.emitted
    return coins


def test_a_perfect_rate_is_not_believed() -> None:
    """Records that leave rejected drafts out agree with each other, but not with the chance of acceptance."""
    name = "rejected-drafts-not-counted"
    assert served(name, CHAIN, unlike_lengths()).broken_identities() == []
    assert acceptance_of(name).result().alarm
    assert not acceptance_of(None).result().alarm


# Drafted tokens and their q


class Recorder(WrappedDrafter):
    """Keeps what was offered, with the law it was claimed to come from."""

    def __init__(self, inner: Drafter, claims: list[tuple[Tensor, int]]) -> None:
        super().__init__(inner)
        self.claims = claims

    def propose(self, context: DraftContext) -> Proposal:
        """Offer what the inner drafter does, and keep it."""
        proposal = self.inner.propose(context)
        q, tokens = proposal.q.to_dense(VOCAB), proposal.tokens.tolist()
        for row, offered in enumerate(proposal.offered):
            self.claims += [(q[row, i], tokens[row][i]) for i in range(offered)]
        return proposal


CLAIMS: dict[str, dict[str, Any]] = {
    "greedy-draft-claims-softmax": {},
    "draft-cooler-than-q": {},
    "draft-truncated-q-whole": {},
    "q-of-raw-logits": {"temperature": 0.7, "top_k": 5},
    "draft-ids-off-by-one": {},
}


def proposals_of(name: str | None, sampling: dict[str, Any]) -> Proposals:
    """Judge the drafts of 64 outputs, about 3,000 tokens."""
    claims: list[tuple[Tensor, int]] = []
    opened = engine()
    alter: Callable[[Strategy], Strategy] = fault(name).alter if name else lambda strategy: strategy
    opened.open(CHAIN, alter=lambda s: plant(alter(s), lambda inner: Recorder(inner, claims)))
    Served(opened, requests(PROMPTS * 16, **{"temperature": 1.0, "max_new_tokens": 32, **sampling}))
    test = Proposals(ALPHA)
    test.add(torch.stack([q for q, _ in claims]).double().numpy(), [token for _, token in claims])
    return test


@pytest.mark.parametrize("name", CLAIMS)
def test_drafts_that_do_not_follow_their_q_are_noticed(name: str) -> None:
    """The drafted tokens were not drawn from the q beside them; without the fault they were."""
    assert proposals_of(name, CLAIMS[name]).result().alarm
    assert not proposals_of(None, CLAIMS[name]).result().alarm


# Identical completions


@pytest.mark.parametrize("name", ["one-stream-for-all", "seed-of-eight-bits"])
def test_shared_streams_are_noticed(name: str) -> None:
    """Of 24 completions of one prompt too many repeat an earlier one; without the fault none does."""
    for planted, alarm in ((name, True), (None, False)):
        offered = [Request(i, PROMPTS[0], SamplingParams(seed=128 * i, max_new_tokens=16)) for i in range(24)]
        streams = Collisions(ALPHA)
        for record in served(planted, CHAIN, offered).records:
            text = (*record.prompt_tokens, *record.output_tokens)
            rows = uncached(shared("llama"), text).double().log_softmax(-1)[len(PROMPTS[0]) - 1 : -1]
            chosen = torch.tensor(record.output_tokens)[:, None]
            streams.add("prompt", record.output_tokens, float(rows.gather(1, chosen).sum()))
        assert streams.result().alarm is alarm


# Log-probabilities

LOGPROBS = [name for name in NAMES if fault(name).CLASS == "logprobs"]


@pytest.mark.parametrize("name", [None, *LOGPROBS])
def test_logprobs_against_the_reference(name: str | None) -> None:
    """They are those of plain forwards, one for every token; with a fault some are not."""
    params: dict[str, Any] = {"temperature": 0.7, "max_new_tokens": 16, "logprobs": 3}
    oracle = Oracle(copied(shared("llama"), "sdpa"), SamplingParams(**params))
    wrong = 0
    for record in served(name, CHAIN, requests(PROMPTS, **params)).records:
        prompt, output = record.prompt_tokens, record.output_tokens
        for _, logits in oracle.rows(prompt, [output]):
            raw, law = logits.double().log_softmax(-1), oracle.law(logits, prompt, output).log()
            wrong += logprob_check.mistaken(record.logprobs, output, raw, law, 3)
    assert (wrong > 0) is (name is not None)


# What samples cannot tell


def test_a_draft_in_bfloat16_is_not_drawn_from_its_q() -> None:
    """The law drawn from differs from q by more than rounding in float32, and by less than .02."""
    drafter = fault("draft-in-bfloat16").alter(strategy_of(CHAIN)).drafter
    logits = 3 * torch.randn(50, 1, VOCAB, generator=torch.Generator().manual_seed(3))
    distances = (drafter.bend(logits).softmax(-1) - logits.softmax(-1)).abs().sum(-1) / 2
    assert 1e-4 < float(distances.mean()) < 0.02


def test_a_ratio_in_bfloat16_decides_otherwise_at_the_edge() -> None:
    """A coin between p / q and p over the rounded q is judged the other way."""
    p, q = torch.tensor([[[0.3, 0.7]] * 2]), torch.tensor([[[0.701, 0.299]]])
    rounded = float(q[0, 0, 0].bfloat16())
    coin = torch.tensor([[(0.3 / 0.701 + 0.3 / rounded) / 2]], dtype=torch.float64)
    proposal = Proposal.chains(torch.tensor([[0]]), [1], Distribution.dense(q))
    decisions = {
        rule.decide(Distribution.dense(p), proposal, coin)[0].item()
        for rule in (RejectionSampling(), rule_of("ratio-in-bfloat16"))
    }
    assert decisions == {0, 1}


# Nothing is left out

TRIED: dict[str, Sequence[str]] = {
    "contract": list(BREAKS),
    "identities": list(CONTRADICTS),
    "acceptance": ["rejected-drafts-not-counted"],
    "proposals": list(CLAIMS),
    "collisions": ["one-stream-for-all", "seed-of-eight-bits"],
    "parameters": [name for name in WHOLE if fault(name).CLASS == "parameters"] + ["q-of-raw-logits"],
    "logprobs": LOGPROBS,
    "unit tests": ["draft-in-bfloat16", "ratio-in-bfloat16"],
}


def test_every_claim_of_a_fault_is_tried_here() -> None:
    """Each place where a fault says that it shows has its case above, and no other fault has one there."""
    for place, tried in TRIED.items():
        assert {name for name in NAMES if place in fault(name).SHOWS} == set(tried), place
    in_laws = {name for name in NAMES if set(REGIMES) & set(fault(name).SHOWS)}
    assert in_laws <= {*RULES, *BENT, *NUMBERS, *WHOLE, *LAWS}
