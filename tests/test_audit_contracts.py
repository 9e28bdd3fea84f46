"""Contracts: our strategies keep them, and each is broken by a decoder that breaks just that.

Two decoders: the real loop on tiny models, and `Scripted`, plain Python that also knows the parameters which
requests are to get, so that their contracts can be tried now.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
from tiny_models import CONTEXT, VOCAB, collect, copied, perturbed, shared

from specbench.audit.contracts import (
    CONTRACTS,
    RENAMED,
    ContractResult,
    Generate,
    Subject,
    check,
    component,
)
from specbench.engines.local import LocalEngine
from specbench.records import FinishReason, Request, RequestRecord, SamplingParams, Schedule

K = 3
PROMPTS = (
    (3, 1, 4, 1, 5, 9, 2, 6, 5, 3),
    (2,),
    (7, 7, 8, 9, 3, 7, 7, 8, 9, 3, 7, 7),
    (16, 0, 16),
)


def results_of(subject: Subject, *names: str) -> dict[str, ContractResult]:
    return {result.name: result for result in check(subject, names or None)}


# The real loop


@cache
def engine() -> LocalEngine:
    """Return an engine on a tiny model, with a draft model that resembles it."""
    target, draft = copied(shared("llama"), "sdpa"), perturbed(shared("llama"), 0.1)
    return LocalEngine(target, eos_ids=(), draft=draft, rows=8, width=CONTEXT)


def local(spec: str, eos: tuple[int, ...] = ()) -> Generate:
    """Return a strategy of that engine, with other EOS ids."""

    def generate(requests: Sequence[Request]) -> list[RequestRecord]:
        engine().open(spec)
        engine().eos_ids = eos
        return list(collect(engine().serve(Schedule(tuple(requests), concurrency=8))).records.values())

    return generate


@pytest.mark.parametrize(
    "spec",
    ["ordinary", "ngram:k=3,min=1", "ngram:k=3,min=1,verify=exact", "draft:k=3", "draft:k=3,verify=exact"],
)
def test_our_strategies_keep_every_contract(spec: str) -> None:
    """Every contract that requests have the parameters for holds, those about an EOS in mid-run included."""
    subject = Subject(
        local(spec),
        PROMPTS,
        0 if spec == "ordinary" else K,
        ordinary=local("ordinary"),
        with_eos=lambda token: local(spec, (token,)),
        repeats_ordinary=spec == "ordinary" or "exact" in spec,
        counter_seeds=True,
    )
    results = results_of(subject)
    assert [result for result in results.values() if result.held is False] == []
    known = {field.name for field in fields(SamplingParams)}
    for result in results.values():
        if result.held is None:
            missing = result.name.replace(" ", "_") not in known
            assert missing or "there is no" in result.words, result
    needed = ("EOS in an accepted run", "finish reasons", "alone or in a batch", "seeds", "stop ids")
    assert all(results[name].held for name in needed)


# A decoder in plain Python


@dataclass(frozen=True, slots=True)
class Wide(SamplingParams):
    """Sampling parameters with all that contracts know of."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    grammar: str | None = None


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def parses(tokens: Sequence[int]) -> bool:
    """Even and odd tokens alternate, an even one first."""
    return all(token % 2 == i % 2 for i, token in enumerate(tokens))


class Scripted:
    """Decodes from a fixed table of logits in rounds of 1 .. k + 1 tokens; `faults` breaks one rule each."""

    def __init__(self, eos: int | None = None, faults: frozenset[str] = frozenset()) -> None:
        self.eos = eos
        self.faults = faults
        self.calls = 0

    def __call__(self, requests: Sequence[Request]) -> list[RequestRecord]:
        self.calls += 1
        first = requests[0].sampling
        records = []
        for row, request in enumerate(requests):
            sampling = request.sampling
            if "bias of row 0" in self.faults:
                sampling = replace(sampling, logit_bias=first.logit_bias)
            if "row 0 for all" in self.faults:
                sampling = replace(sampling, temperature=first.temperature, seed=first.seed)
            if "neighbours" in self.faults and len(requests) > 1:
                sampling = replace(sampling, seed=sampling.seed + row + len(requests))
            records.append(self.decode(request, sampling))
        if "lost" in self.faults:
            records.pop()
        return records

    def decode(self, request: Request, sampling: Any) -> RequestRecord:
        seed = 0 if "one stream" in self.faults else sampling.seed
        if "half a seed" in self.faults:
            seed %= 1 << 32
        if "seed ignored" in self.faults:
            seed += 1000 * self.calls
        rounds = random.Random(request.id + len(request.prompt))
        output: list[int] = []
        sizes: list[int] = []
        reason: FinishReason = "length"
        while True:
            planned = rounds.randint(1, K + 1)
            size = 0
            ended = False
            for place in range(planned):
                token = self.sample(request.prompt, output, sampling, seed, drafted=place < planned - 1)
                output.append(token)
                size += 1
                if end := self.ends(token, output, sampling, in_run=place < planned - 1):
                    reason, ended = end, True
                    break
            sizes.append(size)
            if ended:
                break
        if reason == "length" and "overrun" not in self.faults:
            del output[sampling.max_new_tokens :]
        sizes[-1] -= sum(sizes) - len(output)
        if "miscounted" in self.faults:
            sizes[-1] += 1
        if "reason" in self.faults and reason == "eos" and len(output) == sampling.max_new_tokens:
            reason = "length"
        return RequestRecord(
            request=request.id,
            prompt_id=request.prompt_id,
            prompt_tokens=request.prompt,
            output_tokens=tuple(output),
            sampling=request.sampling,
            arrival=0.0,
            first_scheduled=0.0,
            chunk_times=tuple(float(i) for i in range(len(sizes))),
            chunk_sizes=tuple(sizes),
            finished=1.0,
            finish_reason=reason,
            error="out of memory" if "failing" in self.faults else None,
        )

    def ends(self, token: int, output: list[int], sampling: Any, *, in_run: bool) -> FinishReason | None:
        heeds_eos = not sampling.ignore_eos or "eos not ignored" in self.faults
        blind = ("blind in a run" if in_run else "blind behind a run") in self.faults
        if token == self.eos and heeds_eos and not blind:
            return "eos"
        if token in sampling.stop_token_ids and not (in_run and "stops unseen in a run" in self.faults):
            return "stop"
        strings = [text_of(output)] if "per token" not in self.faults else [text_of([token])]
        if any(string in text for string in sampling.stop_strings for text in strings):
            return "stop"
        overrun = "overrun" in self.faults and in_run
        return "length" if len(output) >= sampling.max_new_tokens and not overrun else None

    def sample(
        self, prompt: Sequence[int], output: list[int], sampling: Any, seed: int, *, drafted: bool
    ) -> int:
        """Sample from the processed logits; under some faults drafted places are not processed."""
        history = [*prompt, *output]
        table = random.Random(history[-1] * 31 + len(history) % 7)
        logits = [table.gauss(0, 2) for _ in range(VOCAB)]
        if "state left behind" in self.faults and self.calls > 1:
            logits[0] += self.calls
        skipped = "bonus row only" in self.faults and drafted
        if not skipped:
            self.process(logits, history, output, sampling)
        cut = sampling.top_k == 1 or sampling.top_p < 1e-3 or sampling.min_p == 1
        if sampling.temperature == 0 or (cut and "no cuts" not in self.faults):
            return logits.index(max(logits))
        weights = [math.exp((logit - max(logits)) / sampling.temperature) for logit in logits]
        place = len(output) % 5 if "numbers come again" in self.faults else len(output)
        coin = random.Random(seed * 100_003 + place)
        return coin.choices(range(VOCAB), weights)[0]

    def process(self, logits: list[float], history: list[int], output: list[int], sampling: Any) -> None:
        for token in set(history):
            logits[token] *= (
                1 / sampling.repetition_penalty if logits[token] > 0 else sampling.repetition_penalty
            )
        for token in set(output):
            logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
        for token, bias in sampling.logit_bias:
            logits[token] += bias
        for word in sampling.bad_words:
            if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]:
                logits[word[-1]] = -1e9
        if len(output) < sampling.min_new_tokens:
            for token in (*(() if self.eos is None else (self.eos,)), *sampling.stop_token_ids):
                logits[token] = -1e9
        if sampling.grammar is not None:
            for token in range(VOCAB):
                if token % 2 != len(output) % 2:
                    logits[token] = -1e9


def scripted(*faults: str, **changes: Any) -> Subject:
    """Return a subject with some faults; what it is compared with has none."""
    broken = frozenset(faults)
    settings: dict[str, Any] = {
        "sampling": Wide(),
        "ordinary": Scripted(),
        "with_eos": lambda token: Scripted(token, broken),
        "repeats_ordinary": True,
        "counter_seeds": True,
        "text": text_of,
        "grammar": "alternating",
        "parses": parses,
    }
    return Subject(Scripted(None, broken), PROMPTS, K, **{**settings, **changes})


def test_a_decoder_that_keeps_all_contracts_passes_all() -> None:
    """Nothing is skipped where every parameter exists, and every contract holds."""
    results = results_of(scripted())
    assert [result for result in results.values() if result.held is not True] == []
    assert set(results) == set(CONTRACTS)


BREAKS = {
    "length limits": "overrun",
    "EOS in an accepted run": "blind in a run",
    "EOS after an accepted run": "blind behind a run",
    "stop ids": "stops unseen in a run",
    "ignore EOS": "eos not ignored",
    "finish reasons": "reason",
    "usage counts": "miscounted",
    "distinct samples": "one stream",
    "seeds": "seed ignored",
    "every bit of a seed": "half a seed",
    "fresh numbers": "numbers come again",
    "second call": "state left behind",
    "alone or in a batch": "neighbours",
    "neighbours": "bias of row 0",
    "sharp sampling": "no cuts",
    "logit bias": "bonus row only",
    "repetition penalty": "bonus row only",
    "presence penalty": "bonus row only",
    "frequency penalty": "bonus row only",
    "bad words": "bonus row only",
    "min new tokens": "bonus row only",
    "stop strings": "per token",
    "grammar": "bonus row only",
}


def test_every_contract_has_a_decoder_that_breaks_it() -> None:
    """A new contract needs its fault here."""
    assert set(BREAKS) == set(CONTRACTS)


@pytest.mark.parametrize("name", CONTRACTS)
def test_each_contract_notices_what_breaks_it(name: str) -> None:
    """The decoder with the fault breaks the contract, and says where."""
    result = results_of(scripted(BREAKS[name]), name)[name]
    assert result.held is False
    assert len(result.words) > 20


@pytest.mark.parametrize("name", ["alone or in a batch", "second call", "seeds"])
def test_row_parameters_and_state_are_noticed(name: str) -> None:
    """Parameters of row 0 applied to all rows show in a batch of unlike requests."""
    fault = {"alone or in a batch": "row 0 for all", "second call": "seed ignored", "seeds": "row 0 for all"}
    assert results_of(scripted(fault[name]), name)[name].held is False


@pytest.mark.parametrize("fault", ["lost", "failing"])
def test_a_request_without_an_answer_breaks_whatever_asked(fault: str) -> None:
    """A request that is lost or fails is a breach, not an exception."""
    result = results_of(scripted(fault), "usage counts")["usage counts"]
    assert result.held is False
    assert ("never finished" if fault == "lost" else "out of memory") in result.words


# Breaking the real loop


def asked_otherwise(generate: Generate, change: Callable[[Request, int], dict[str, Any]]) -> Generate:
    """Return a decoder that is asked for something else than was asked, by place in the batch."""

    def broken(requests: Sequence[Request]) -> Sequence[RequestRecord]:
        return generate(
            [
                replace(request, sampling=replace(request.sampling, **change(request, place)))
                for place, request in enumerate(requests)
            ]
        )

    return broken


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("length limits", lambda request, place: {"max_new_tokens": request.sampling.max_new_tokens + 1}),
        ("stop ids", lambda request, place: {"stop_token_ids": ()}),
        ("distinct samples", lambda request, place: {"seed": 5}),
        ("seeds", lambda request, place: {"seed": request.sampling.seed + 1}),
        ("alone or in a batch", lambda request, place: {"seed": place}),
    ],
)
def test_wrappers_around_the_real_loop_are_noticed(name: str, change: Any) -> None:
    """A budget off by one, stop ids not passed on, one seed, another seed, and seeds by row."""
    subject = Subject(
        asked_otherwise(local("draft:k=3,verify=exact"), change),
        PROMPTS,
        K,
        ordinary=local("ordinary"),
        repeats_ordinary=True,
        counter_seeds=True,
    )
    assert results_of(subject, name)[name].held is False


# Draft lengths that something else than the text decides


def with_lengths(varied: bool) -> Subject:
    """Return a decoder that ignores seeds, which tells draft lengths: other ones in a call if `varied`."""
    decoder = scripted("seed ignored")
    calls: list[int] = []

    def generate(requests: Sequence[Request]) -> Sequence[RequestRecord]:
        calls.append(len(calls))
        return decoder.generate(requests)

    def drafts() -> dict[int, tuple[int, ...]]:
        length = calls[-1] if varied else 2
        return dict.fromkeys(range(2 * RENAMED), (length, length))

    return replace(decoder, generate=generate, drafts=drafts)


@pytest.mark.parametrize("name", ["seeds", "second call", "alone or in a batch"])
def test_other_draft_lengths_excuse_other_random_numbers(name: str) -> None:
    """Where lengths differ from call to call, samples may; where they are the same, it is the seed."""
    assert results_of(with_lengths(False), name)[name].held is False
    assert results_of(with_lengths(True), name)[name].held is not False


# What cannot be tested


def test_what_cannot_be_tested_says_why() -> None:
    """Without parameters, tokenizer, grammar or an EOS to declare, a contract is neither kept nor broken."""
    bare = Subject(Scripted(), PROMPTS, K, sampling=Wide(), repeats_ordinary=True)
    words = {name: result.words for name, result in results_of(bare).items() if result.held is None}
    assert words == {
        "EOS in an accepted run": "the EOS of this engine cannot be declared",
        "EOS after an accepted run": "the EOS of this engine cannot be declared",
        "ignore EOS": "the EOS of this engine cannot be declared",
        "finish reasons": "the EOS of this engine cannot be declared",
        "min new tokens": "the EOS of this engine cannot be declared",
        "seeds": "there is no ordinary decoding to compare with",
        "repetition penalty": "there is no ordinary decoding to compare with",
        "presence penalty": "there is no ordinary decoding to compare with",
        "frequency penalty": "there is no ordinary decoding to compare with",
        "stop strings": "there is no tokenizer to make text with",
        "grammar": "there is no grammar to try",
    }


def test_a_missing_parameter_is_named() -> None:
    """Requests that have no such parameter leave the contract untested."""

    @dataclass(frozen=True, slots=True)
    class Renamed:
        temperature: float = 1.0
        seed: int = 0
        max_new_tokens: int = 8
        ignore_eos: bool = False

    subject = scripted(sampling=Renamed())
    result = results_of(subject, "logit bias")["logit bias"]
    assert (result.held, result.words) == (None, "requests have no parameter 'logit_bias'")


def test_an_accepted_run_is_needed_to_stop_inside_one() -> None:
    """A decoder whose drafts are never accepted cannot show what it does with an EOS in mid-run."""

    def one_by_one(requests: Sequence[Request]) -> list[RequestRecord]:
        return [
            replace(record, chunk_sizes=(1,) * len(record.output_tokens)) for record in Scripted()(requests)
        ]

    subject = replace(scripted(), generate=one_by_one)
    result = results_of(subject, "EOS in an accepted run")["EOS in an accepted run"]
    assert result.held is None
    assert "no accepted run" in result.words


def test_contracts_as_one_component() -> None:
    """Any breach alarms; what was not tested is no breach, and nothing tested is inconclusive."""
    kept, broken = ContractResult("a", True, "fine"), ContractResult("b", False, "overrun")
    gap = ContractResult("c", None, "no tokenizer")
    assert component([kept, gap]).words == "1 of 2 held, the others could not be tested"
    assert component([kept]).words == "all 1 held"
    both = component([kept, broken, gap])
    assert (both.alarm, both.kind, both.evidence, both.words) == (True, "exact", 1.0, "b: overrun")
    assert not component([gap]).conclusive
