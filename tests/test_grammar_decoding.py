"""Grammars under speculation: every output is a text of its grammar, and its law is the masked target's."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_grammar import PADDING, SCHEMAS, TOKENS, is_valid, toy, toy_tokenizer
from tiny_models import Served, build, collect, copied, perturbed, uncached
from torch import Tensor

from specbench import models as specbench_models
from specbench import registry
from specbench.audit.chi_squared import ChiSquaredResult, judge
from specbench.audit.reference import Oracle
from specbench.bench.sampling import parse_sampling
from specbench.decoding.verification import RULES, Proposal
from specbench.engines.local import LocalEngine
from specbench.errors import UsageError
from specbench.records import Request, SamplingParams, Schedule
from specbench.records import samples as draw_samples
from specbench.runtime.grammar import Matcher, window_masks
from specbench.runtime.loop import StepLoop, Window
from specbench.runtime.protocols import DraftContext, Strategy
from specbench.workloads import load

VOCAB = len(TOKENS) + 1 + PADDING
WIDTH = 64

CHAINS = ("ngram:k=3,min=1", "suffix:k=3", "draft:k=3", "early-exit:layers=2,k=3")
TREES = ("suffix:k=3,nodes=6,factor=4,min_prob=0.01", "draft:topk=2,depth=2", "draft:topk=3,depth=3,nodes=7")
LOSSLESS = ("rejection", "exact", "block")
SPECS = (
    "ordinary",
    *(f"{chain},verify={rule}" for chain in CHAINS for rule in LOSSLESS),
    *(f"{tree},verify={rule}" for tree in TREES for rule in LOSSLESS if RULES[rule].judges_trees),
    "draft:k=4,verify=rejection,policy=confidence(threshold=0.3)",
    "draft:k=3,verify=rejection,policy=ema(alpha=0.5,warmup=1,interval=1,tiers=1:0-1-3)",
)
LOSSY = tuple(f"{chain},verify={rule}" for chain in CHAINS for rule in RULES if not RULES[rule].lossless)
every = pytest.mark.parametrize("spec", SPECS)

REGEX = "(ab|c|1)+b?"
CHOICES = ("abc", "aabab", "cab1", "é")
GRAMMARS = (f"regex:{REGEX}", "choice:" + json.dumps(CHOICES), "regex:a*b(1|c){2,3}", None)
EXPRESSIONS = (REGEX, "|".join(CHOICES), "a*b(1|c){2,3}", None)

AB, C, ONE = 5, 3, 4
PROMPTS = (
    (AB, C, AB, C, ONE, AB, C),
    (1, 2, 3),
    (7,),
    (C, 1, 6, C, 1, 6, ONE, ONE, C, 1, 6),
    (2, 3, 3, 2, 3, 3, 2),
)


@functools.cache
def target() -> Any:
    """Return the model under test."""
    return build("llama", vocab_size=VOCAB, head=0.3)


def engine_for(
    draft: Any | None = None, *, rows: int = 8, draft_ids: Sequence[int] | None = None, noise: float = 0.2
) -> LocalEngine:
    """Return an engine with the toy tokenizer, EOS 0."""
    return LocalEngine(
        copied(target(), "sdpa"),
        eos_ids=(0,),
        draft=draft if draft is not None else perturbed(target(), noise),
        draft_ids=draft_ids,
        tokenizer=toy_tokenizer(TOKENS),
        rows=rows,
        width=WIDTH,
    )


@pytest.fixture(scope="module")
def opened() -> LocalEngine:
    """One engine for all tests that do not change it."""
    return engine_for()


def batch(**sampling: Any) -> list[Request]:
    """Return requests whose prompts, grammars and seeds differ; some have no grammar."""
    return [
        Request(
            i,
            PROMPTS[i % len(PROMPTS)],
            SamplingParams(
                **{
                    "seed": 17 * i,
                    "max_new_tokens": 14,
                    "grammar": GRAMMARS[i % len(GRAMMARS)],
                    **sampling,
                }
            ),
            f"p{i}",
        )
        for i in range(12)
    ]


def serve(engine: LocalEngine, spec: str, offered: Sequence[Request], **options: Any) -> Served:
    """Serve requests with a strategy, 4 at a time unless told otherwise."""
    engine.open(spec, alter=options.pop("alter", None))
    return collect(engine.serve(Schedule(tuple(offered), **{"concurrency": 4, **options})))


def written(tokens: Sequence[int]) -> bytes:
    """Return what tokens of the toy vocabulary spell, without EOS; ids that are padding spell `?`."""
    spelt = (b"", *TOKENS, *[b"?"] * PADDING)
    return b"".join(spelt[token] for token in tokens)


def outside(served: Served) -> list[list[int]]:
    """Return the outputs that are no text of their grammar, nor the beginning of one where the budget ended.

    A finished one is judged by `re`; one cut short must be what a new matcher accepts.
    """
    found = []
    for record in served.records.values():
        grammar, tokens = record.sampling.grammar, list(record.output_tokens)
        if grammar is None:
            continue
        if record.finish_reason == "eos":
            expression = EXPRESSIONS[GRAMMARS.index(grammar)]
            assert expression is not None
            text = written(tokens).decode(errors="replace")
            fits = tokens[-1] == 0 and re.fullmatch(expression, text) is not None
        else:
            matcher = toy().matcher(grammar)
            fits = all(matcher.accept(token) for token in tokens)
        if not fits:
            found.append(tokens)
    return found


def allowed_after(grammar: str) -> Callable[[Sequence[int]], Tensor]:
    """Return what a grammar allows after an output, by a new matcher for each."""

    @functools.cache
    def mask(output: tuple[int, ...]) -> Tensor:
        matcher = toy().matcher(grammar)
        assert all(matcher.accept(token) for token in output)
        return matcher.allowed()

    return lambda output: mask(tuple(output))


def naive(request: Request) -> list[int]:
    """Return the greedy output by the plainest means: a whole forward and a new matcher for each token."""
    sampling = request.sampling
    allowed = None if sampling.grammar is None else allowed_after(sampling.grammar)
    oracle = Oracle(target(), sampling, (0,), allowed=allowed)
    output: list[int] = []
    while len(output) < sampling.max_new_tokens and 0 not in output:
        (law,) = oracle.next_distributions([[*request.prompt, *output]], [len(request.prompt)])
        output.append(int(law.argmax()))
    return output


@functools.cache
def naive_batch(**sampling: Any) -> list[list[int]]:
    """Return `naive` of each request of a batch at temperature 0."""
    return [naive(request) for request in batch(temperature=0.0, **sampling)]


def test_every_strategy_is_here() -> None:
    """All files of the package are tried, those that draft with every rule and every policy."""
    assert {spec.partition(":")[0] for spec in (*SPECS, *LOSSY)} == set(registry.names("strategy"))
    for chain in CHAINS:
        mine = [spec for spec in (*SPECS, *LOSSY) if spec.startswith(f"{chain},verify=")]
        assert {spec.partition("verify=")[2].partition(",")[0] for spec in mine} == set(RULES)
    policies = {spec.partition("policy=")[2].partition("(")[0] for spec in SPECS} - {""}
    assert policies | {"fixed"} == set(registry.names("policy"))


@pytest.mark.parametrize("spec", [*SPECS, *LOSSY])
def test_every_output_is_in_its_grammar(spec: str, opened: LocalEngine) -> None:
    """In a batch with and without grammars each answer is a text of its own, or begins one."""
    served = serve(opened, spec, batch(temperature=1.8))
    assert outside(served) == []
    assert "eos" in served.reasons
    if spec != "ordinary":
        assert sum(entry.accepted for entry in served.rounds) > 0


@every
def test_greedy_output_is_the_oracles(spec: str, opened: LocalEngine) -> None:
    """At temperature 0 each row gives the argmax of uncached logits under the mask of a new matcher."""
    assert serve(opened, spec, batch(temperature=0.0)).outputs == naive_batch()


@every
def test_greedy_output_with_penalties_is_the_oracles(spec: str, opened: LocalEngine) -> None:
    """The same with parameters that depend on the history of a row."""
    more = {"repetition_penalty": 1.4, "frequency_penalty": 0.8, "logit_bias": ((C, -1.5), (AB, 1.0))}
    served = serve(opened, spec, batch(temperature=0.0, **more))
    assert served.outputs == naive_batch(**more)
    assert served.outputs != naive_batch()


def test_the_naive_oracle_reads_logits_as_they_are() -> None:
    """Without a grammar it is the argmax of a plain forward."""
    request = batch(temperature=0.0, grammar=None)[0]
    first = int(uncached(target(), request.prompt)[-1].argmax())
    assert naive(request)[0] == first


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "verify=exact" in spec])
def test_exact_match_is_ordinary_decoding_token_for_token(spec: str, opened: LocalEngine) -> None:
    """Verified by exact match, a strategy emits under one seed what ordinary decoding emits."""
    for sampling in ({}, {"temperature": 1.7, "top_k": 5, "presence_penalty": 0.5}):
        offered = batch(**sampling)
        greedy = [replace(r, sampling=replace(r.sampling, temperature=0.0)) for r in offered[::3]]
        offered[::3] = greedy  # rows with and without random numbers in one batch
        ordinary = serve(opened, "ordinary", offered)
        assert serve(opened, spec, offered).outputs == ordinary.outputs


@every
def test_samples_of_one_prompt(spec: str, opened: LocalEngine) -> None:
    """Samples of one prompt under one grammar share a prefill, go on by themselves, and stay within it."""
    request = Request(0, PROMPTS[0], SamplingParams(seed=3, max_new_tokens=14, grammar=GRAMMARS[0]), "p")
    several = draw_samples(request, 6)
    served = serve(opened, spec, several, concurrency=1, samples=6, share_prefill=True)
    assert outside(served) == []
    assert sum(step.phase == "prefill" for step in served.steps) == 1
    assert len({tuple(output) for output in served.outputs}) > 1
    if "ema" not in spec:
        assert served.outputs == [serve(opened, spec, [each]).outputs[0] for each in several]


@every
def test_eos_comes_when_the_grammar_is_complete(spec: str, opened: LocalEngine) -> None:
    """Where nothing may follow a text, EOS does, and ends the request although budget is left."""
    for temperature in (0.0, 1.0):
        served = serve(opened, spec, batch(temperature=temperature, grammar=GRAMMARS[1], max_new_tokens=40))
        assert set(served.reasons) == {"eos"}
        assert {written(output).decode() for output in served.outputs} <= set(CHOICES)
        assert all(output.index(0) == len(output) - 1 for output in served.outputs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", ["ngram:k=3,min=1,verify=rejection", *TREES])
def test_certain_drafts_that_a_grammar_forbids_are_cut(
    spec: str, temperature: float, opened: LocalEngine
) -> None:
    """No forbidden token reaches the target: all recorded ones continue the answer.

    That includes siblings in a tree that stand for nothing, where the grammar allows fewer than there are.
    """
    cut: list[int] = []

    class Counting(StepLoop):
        def grammar_masks(
            self, matcher: Matcher, nodes: Sequence[int], parents: Sequence[int]
        ) -> tuple[list[int], Tensor]:
            kept, bits = super().grammar_masks(matcher, nodes, parents)
            cut.append(len(nodes) - len(kept))
            return kept, bits

    alter = with_loop(Counting)
    served = serve(opened, spec, batch(temperature=temperature), record_drafts=True, alter=alter)
    assert sum(cut) > 5
    place: dict[int, int] = {}
    checked = 0
    for entry in served.rounds:
        record = served.records[entry.request]
        start = place.get(entry.request, 0)
        place[entry.request] = start + entry.emitted
        if record.sampling.grammar is None or not entry.draft_tokens:
            continue
        matcher = toy().matcher(record.sampling.grammar)
        assert all(matcher.accept(token) for token in record.output_tokens[:start])
        parents = entry.draft_parents or tuple(range(-1, entry.drafted - 1))
        kept, _ = window_masks(matcher, entry.draft_tokens, parents)
        assert len(kept) == entry.drafted
        checked += entry.drafted
    assert checked > 10


# --- the law of whole outputs -----------------------------------------------------------------

DRAWS = 600
SEED = 4711
ALPHA = 1e-4
SMALL = "regex:(ab|c|1){2,3}"
"""Few texts, each to be cut into tokens in several ways: a and b or ab, b and c or bc."""
BRANCHES = ((AB, C, AB, C, ONE, AB, C), (ONE, 1, 2, 3, ONE, 1))
HORIZON = 7


@functools.cache
def law_of(prompt: tuple[int, ...], **sampling: Any) -> Any:
    """Return the exact law of whole answers to a prompt."""
    params = SamplingParams(max_new_tokens=HORIZON, grammar=SMALL, **sampling)
    oracle = Oracle(target(), params, (0,), allowed=allowed_after(SMALL))
    return oracle.continuation_law(prompt, HORIZON)


def drawn(engine: LocalEngine, spec: str, *, alter: Any = None, **sampling: Any) -> ChiSquaredResult:
    """Draw whole answers and judge them by their exact law."""
    tables = []
    for number, prompt in enumerate(BRANCHES):
        offered = [
            Request(
                i,
                prompt,
                SamplingParams(
                    seed=SEED + number * DRAWS + i, max_new_tokens=HORIZON, grammar=SMALL, **sampling
                ),
            )
            for i in range(DRAWS)
        ]
        served = serve(engine, spec, offered, concurrency=250, share_prefill=True, alter=alter)
        assert set(served.reasons) == {"eos"}
        tables.append((law_of(prompt, **sampling), [tuple(output) for output in served.outputs]))
    return judge(tables, alpha=ALPHA, generator=np.random.default_rng(SEED))


def assert_held(result: ChiSquaredResult) -> None:
    """Check that a law was held, by a test that could have found it broken."""
    assert result.out_of_support == 0
    assert result.is_rejected is False, (result.p_value, result.tv_observed)
    assert result.df >= 15
    assert result.smallest_detectable_tv is not None
    assert result.smallest_detectable_tv < 0.15


@pytest.fixture(scope="module")
def wide() -> LocalEngine:
    """An engine with many rows."""
    return engine_for(rows=250)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "exact" not in spec])
def test_whole_outputs_follow_the_masked_law(spec: str, wide: LocalEngine) -> None:
    """1,200 answers pass a chi-squared test against the exact law of the target under the grammar.

    Exact match needs none of its own: it is ordinary decoding token for token.
    """
    assert_held(drawn(wide, spec))


@pytest.mark.parametrize(
    "spec", ["ngram:k=3,min=1", "draft:k=3", "draft:k=3,verify=block", "draft:topk=2,depth=2", TREES[0]]
)
def test_whole_outputs_follow_the_law_of_all_parameters(spec: str, wide: LocalEngine) -> None:
    """The same with a grammar, penalties, biases, temperature and top-p together."""
    more = {"temperature": 1.3, "top_p": 0.95, "frequency_penalty": 0.7, "logit_bias": ((C, 0.5),)}
    assert_held(drawn(wide, spec, **more))


# --- drafts with another vocabulary -----------------------------------------------------------


def rearranged(model: Any, ids: Sequence[int]) -> Any:
    """Return a model whose token i is token `ids[i]` of another: its rows taken in that order."""
    small = build("llama", vocab_size=len(ids))
    state = model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][list(ids)]
    small.load_state_dict(state)
    return small


PERMUTED = tuple(int(i) for i in torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3)))
PART = (3, 0, 5, 1, 4, 8, 9)
"""Lacks b, so that the draft cannot finish what it begins with a."""


@pytest.mark.parametrize(
    ("spec", "ids"),
    [("draft:k=3", PERMUTED), ("draft:k=3", PART), ("draft:topk=2,depth=2", PART)],
    ids=["permuted", "part", "tree-part"],
)
def test_a_draft_with_other_ids_under_a_grammar(spec: str, ids: tuple[int, ...]) -> None:
    """Mapped drafts keep outputs within the grammar, greedily the oracle's, and their law the target's."""
    draft = rearranged(perturbed(target(), 0.1), ids)
    engine = engine_for(draft, draft_ids=ids, rows=250)
    served = serve(engine, spec, batch(temperature=0.0))
    assert served.outputs == naive_batch()
    assert sum(entry.accepted for entry in served.rounds) > 0
    assert outside(serve(engine, spec, batch())) == []
    assert_held(drawn(engine, spec))


# --- planted faults ---------------------------------------------------------------------------


class Unmasked(StepLoop):
    """Forgets the mask of one row of a window, the one after the first node."""

    def grammar_masks(
        self, matcher: Matcher, nodes: Sequence[int], parents: Sequence[int]
    ) -> tuple[list[int], Tensor]:
        """Return everything as allowed after the first node."""
        kept, bits = super().grammar_masks(matcher, nodes, parents)
        bits[1:2] = -1
        return kept, bits


class NotRolledBack(StepLoop):
    """Leaves the matcher after the drafts instead of after what was accepted."""

    def grammar_masks(
        self, matcher: Matcher, nodes: Sequence[int], parents: Sequence[int]
    ) -> tuple[list[int], Tensor]:
        """Walk on along the kept nodes."""
        kept, bits = super().grammar_masks(matcher, nodes, parents)
        for node in kept[:1]:
            matcher.accept(nodes[node])
        return kept, bits


class CutAfterDrawing(StepLoop):
    """Cuts a sampled draft at its first forbidden token, after a look at it."""

    def _constrain(self, window: Window) -> None:
        proposal = window.proposal
        if proposal.num:
            offered = []
            for row, tokens, count in zip(
                window.rows, proposal.tokens.tolist(), proposal.offered, strict=True
            ):
                assert row.matcher is not None
                kept, _ = window_masks(row.matcher, tokens[:count], range(-1, count - 1))
                offered.append(len(kept))
            window.proposal = Proposal.chains(proposal.tokens, offered, proposal.q)
        super()._constrain(window)


class Unconstrained:
    """A drafter that is told of no grammar."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def propose(self, context: DraftContext) -> Proposal:
        """Propose as if there were none."""
        return self.inner.propose(replace(context, matchers=None))  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def with_loop(loop: type[StepLoop]) -> Callable[[Strategy], Strategy]:
    """Return an alteration that swaps the step loop."""
    return lambda strategy: replace(strategy, loop=loop)


FAULTY = (
    "ngram:k=3,min=1,verify=rejection",
    "draft:k=3,verify=rejection",
    "draft:topk=2,depth=2,verify=exact",
)


@pytest.mark.parametrize("spec", FAULTY)
@pytest.mark.parametrize("fault", [Unmasked, NotRolledBack])
def test_a_wrong_mask_is_found(spec: str, fault: type[StepLoop], opened: LocalEngine) -> None:
    """A row without its mask, and a matcher that was not rolled back, fail what the strategies pass."""
    greedy = serve(opened, spec, batch(temperature=0.0), alter=with_loop(fault))
    sampled = serve(opened, spec, batch(temperature=2.5), alter=with_loop(fault))
    assert greedy.outputs != naive_batch()
    assert fault is NotRolledBack or outside(sampled)


def test_a_draft_cut_after_it_was_drawn_is_found(wide: LocalEngine) -> None:
    """Whether a position is drafted must not depend on its token: the law shows it, the grammar holds."""

    def alter(strategy: Strategy) -> Strategy:
        drafter: Any = Unconstrained(strategy.drafter)
        return replace(strategy, drafter=drafter, loop=CutAfterDrawing)

    result = drawn(wide, "draft:k=3", alter=alter)
    assert result.out_of_support == 0
    assert result.is_rejected


def test_a_draft_that_knows_of_no_grammar_is_harmless(wide: LocalEngine) -> None:
    """Left whole, a draft that was not masked costs acceptance and changes nothing: the fault is the cut."""

    def alter(strategy: Strategy) -> Strategy:
        drafter: Any = Unconstrained(strategy.drafter)
        return replace(strategy, drafter=drafter)

    assert_held(drawn(wide, "draft:k=3", alter=alter))


# --- the bundled pair -------------------------------------------------------------------------

PAIR = (
    "ordinary",
    "ngram:k=4",
    "suffix:k=6",
    "suffix:k=6,nodes=8",
    "draft:k=3",
    "draft:k=3,verify=block",
    "draft:topk=2,depth=3",
    "early-exit:layers=2,k=2",
)


@pytest.fixture(scope="module")
def pair() -> LocalEngine:
    """The bundled target with its draft."""
    names = ("tiny", "tiny-draft")  # in float32: as stored, in float16, near-ties go either way
    loaded, draft = (specbench_models.load(name, dtype="float32") for name in names)
    return LocalEngine(
        loaded.model,
        eos_ids=loaded.eos_token_ids,
        draft=draft.model,
        tokenizer=loaded.tokenizer,
        rows=6,
        width=512,
    )


SCHEMA = SCHEMAS["nested"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", PAIR)
def test_the_bundled_pair_answers_in_form(spec: str, temperature: float, pair: LocalEngine) -> None:
    """A schema, an expression and a list of choices: what is finished parses; greedily as ordinary."""
    prompts = load("tiny-structured").limited(4).prompts
    tokenizer = pair.tokenizer
    grammars = [prompt.grammar for prompt in prompts]
    texts = [prompt.plain for prompt in prompts]
    grammars += ["json:" + json.dumps(SCHEMA), "regex:[A-Z]{2}-[0-9]{1,3}"]
    texts += ["rows: ", "code: "]
    assert {str(grammar).partition(":")[0] for grammar in grammars} >= {"json", "regex", "choice"}
    assert tokenizer is not None
    offered = [
        Request(
            i,
            tuple(tokenizer(text)["input_ids"]),
            SamplingParams(temperature=temperature, seed=i, max_new_tokens=48, grammar=grammar),
        )
        for i, (text, grammar) in enumerate(zip(texts, grammars, strict=True))
    ]
    served = serve(pair, spec, offered, concurrency=6)
    finished = 0
    for i, (output, reason) in enumerate(zip(served.outputs, served.reasons, strict=True)):
        if reason != "eos":
            continue
        finished += 1
        text = tokenizer.decode(output[:-1])
        kind, _, body = str(grammars[i]).partition(":")
        if kind == "json":
            value = json.loads(text)
            assert i != 4 or is_valid(value, SCHEMA, SCHEMA)
        elif kind == "regex":
            assert re.fullmatch(body, text)
        else:
            assert text in json.loads(body)
    assert finished >= 4
    if temperature == 0:
        assert served.outputs == serve(pair, "ordinary", offered, concurrency=6).outputs


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (["ignore_eos=true", "grammar=regex:a+"], "ignore_eos is True; expected False beside a grammar"),
        (["min_new_tokens=3", "grammar=regex:a+"], "min_new_tokens is 3; expected 0 beside a grammar"),
    ],
)
def test_what_contradicts_a_grammar(settings: list[str], what: str) -> None:
    """The grammar says when an answer may end: asking for more is refused in one line."""
    with pytest.raises(UsageError, match=re.escape(what)) as caught:
        parse_sampling(settings)
    assert "\n" not in caught.value.message


def test_a_grammar_needs_a_tokenizer() -> None:
    """An engine without one refuses the request, and names it."""
    engine = LocalEngine(copied(target(), "sdpa"), eos_ids=(0,), rows=2, width=WIDTH)
    with pytest.raises(UsageError, match="request 0 has a grammar, and this engine was given no tokenizer"):
        serve(engine, "ordinary", batch())


def test_an_unsatisfiable_grammar_is_refused_before_anything_is_decoded(opened: LocalEngine) -> None:
    """The grammar of the last request is read before the first one is served."""
    *others, last = batch()
    last = replace(last, sampling=replace(last.sampling, grammar="regex:ay"))
    opened.open("ordinary")
    with pytest.raises(UsageError, match="cannot write any text of it"):
        opened.serve(Schedule((*others, last)))
