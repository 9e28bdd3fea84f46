"""What every decoder owes its callers exactly, whatever it samples: lengths, stops, seeds, parameters.

Each contract is asked of a callable that serves requests and returns their records, so of any engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

from specbench.audit.verdicts import ComponentResult
from specbench.records import FinishReason, Request, RequestRecord, SamplingParams

Generate = Callable[[Sequence[Request]], Sequence[RequestRecord]]
"""Serves some requests together, and returns one record for each, in any order."""

SAMPLES = 6
CUTS = 8
"""Places at which a text is stopped, at most, over all prompts."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is held to the contracts, and what it claims.

    Args:
        generate: The decoder.
        prompts: Several, unlike in length, with room for `length` more tokens each.
        max_draft: The longest draft, k; 0 for ordinary decoding.
        sampling: Parameters that requests have where a contract does not set them.
        ordinary: The same engine without speculation; None leaves out what is compared with it.
        with_eos: Gives the decoder with one token declared as its only EOS; None where that is not possible.
        repeats_ordinary: Whether it claims ordinary decoding's sampled output under the same seed.
        counter_seeds: Whether it claims that a request's random numbers depend on its seed alone.
        text: Detokenises.
        grammar: A value for the parameter of that name, and `parses`, which says whether tokens obey it.
    """

    generate: Generate
    prompts: tuple[tuple[int, ...], ...]
    max_draft: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    ordinary: Generate | None = None
    with_eos: Callable[[int], Generate] | None = None
    repeats_ordinary: bool = False
    counter_seeds: bool = False
    text: Callable[[Sequence[int]], str] | None = None
    grammar: Any = None
    parses: Callable[[Sequence[int]], bool] | None = None

    @property
    def length(self) -> int:
        """Return the tokens of a long output: several rounds."""
        return max(24, 2 * (self.max_draft + 3))


@dataclass(frozen=True, slots=True)
class ContractResult:
    """Whether a contract held; None when it could not be tested, and `words` say why."""

    name: str
    held: bool | None
    words: str


class Broken(Exception):
    """The contract does not hold; the message says where."""


class NotTested(Exception):
    """The contract could not be tested; the message says why."""


GREEDY: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SAMPLED: Mapping[str, Any] = {"temperature": 1.0, "ignore_eos": True}


def check(subject: Subject, names: Sequence[str] | None = None) -> tuple[ContractResult, ...]:
    """Ask contracts of a decoder.

    Null hypothesis: the decoder keeps the contract in each of the few cases tried. Nothing is random but the
    decoder's own sampling, under fixed seeds, so a breach is certain and has no p-value.

    Invalid where greedy decoding is not reproducible (it changes with the batch in low precision): run in
    float32. A contract that held was tried on a few prompts; it is not proved.

    Args:
        subject: The decoder and what it claims.
        names: Some of `CONTRACTS`; all by default.
    """
    return tuple(asked(name, CONTRACTS[name], subject) for name in (CONTRACTS if names is None else names))


def asked(name: str, contract: Callable[[Subject], str], subject: Subject) -> ContractResult:
    """Ask one contract of a decoder."""
    try:
        return ContractResult(name, True, contract(subject))
    except Broken as breach:
        return ContractResult(name, False, str(breach))
    except NotTested as gap:
        return ContractResult(name, None, str(gap))


def component(results: Sequence[ContractResult], tokens: int = 0) -> ComponentResult:
    """Return some contracts as one component: an alarm if any is broken."""
    broken = [result for result in results if result.held is False]
    held = sum(result.held is True for result in results)
    words = f"{held} of {len(results)} held, the others could not be tested"
    if broken:
        others = ", ".join(result.name for result in broken[1:])
        words = f"{broken[0].name}: {broken[0].words}" + (f"; also broken: {others}" if others else "")
    elif held == len(results):
        words = f"all {held} held"
    return ComponentResult(
        "contracts", bool(broken), float(len(broken)), "exact", 0.0, tokens, words, conclusive=held > 0
    )


# Serving


def made_request(subject: Subject, number: int, prompt: Sequence[int], **changes: Any) -> Request:
    sampling = replace(subject.sampling, **{"max_new_tokens": subject.length, **changes})
    return Request(number, tuple(prompt), sampling, f"contract-{number}")


def served(generate: Generate, requests: Sequence[Request]) -> list[RequestRecord]:
    """Return the records in the order of the requests; each request must have one, without an error."""
    records = {record.request: record for record in generate(requests)}
    for request in requests:
        if request.id not in records:
            raise Broken(f"request {request.id} was never finished")
        if (error := records[request.id].error) is not None:
            raise Broken(f"request {request.id} failed: {error}")
    return [records[request.id] for request in requests]


def serve_all(subject: Subject, generate: Generate | None = None, **changes: Any) -> list[RequestRecord]:
    """Serve every prompt in one batch with one set of parameters, seeds apart."""
    requests = [
        made_request(subject, i, prompt, **{"seed": 7 + i, **changes})
        for i, prompt in enumerate(subject.prompts)
    ]
    return served(generate or subject.generate, requests)


def serve_one(subject: Subject, generate: Generate, prompt: Sequence[int], **changes: Any) -> RequestRecord:
    return served(generate, [made_request(subject, 0, prompt, **changes)])[0]


def _expect(record: RequestRecord, tokens: Sequence[int], reason: FinishReason, case: str) -> None:
    """Compare one output with what it must be."""
    if record.output_tokens != tuple(tokens):
        raise Broken(f"{case}: {tokens_shown(record.output_tokens)}; expected {tokens_shown(tokens)}")
    if record.finish_reason != reason:
        raise Broken(f"{case}: finish reason '{record.finish_reason}'; expected '{reason}'")


def _equal(some: Sequence[RequestRecord], others: Sequence[RequestRecord], case: str) -> None:
    """Compare outputs of the same requests."""
    for one, other in zip(some, others, strict=True):
        if one.output_tokens != other.output_tokens:
            shown = f"{tokens_shown(one.output_tokens)} and {tokens_shown(other.output_tokens)}"
            raise Broken(f"request {one.request}, {case}: {shown}")


def tokens_shown(tokens: Sequence[int]) -> str:
    listed = " ".join(map(str, tokens[:12]))
    return f"{len(tokens)} tokens [{listed}{' …' if len(tokens) > 12 else ''}]"


def _require(subject: Subject, *parameters: str) -> None:
    known = {entry.name for entry in fields(subject.sampling)}
    for parameter in parameters:
        if parameter not in known:
            raise NotTested(f"requests have no parameter '{parameter}'")


# Where to stop a text


@dataclass(frozen=True, slots=True)
class _Cut:
    """A place in a prompt's greedy output whose token occurs there first."""

    prompt: tuple[int, ...]
    whole: tuple[int, ...]
    place: int

    @property
    def token(self) -> int:
        return self.whole[self.place]

    @property
    def kept(self) -> tuple[int, ...]:
        return self.whole[: self.place + 1]


def find_cuts(subject: Subject) -> list[_Cut]:
    """Find places to stop: with drafts, such that an accepted run goes on beyond them."""
    found = [
        list(islice(_cuts_of(record, subject.max_draft), CUTS)) for record in serve_all(subject, **GREEDY)
    ]
    # One of each prompt in turn, so that a few cuts meet all prompts.
    by_turn = [cuts[turn] for turn in range(CUTS) for cuts in found if turn < len(cuts)][:CUTS]
    if not by_turn:
        raise NotTested("no accepted run of the greedy outputs has a new token before its end")
    return by_turn


def _cuts_of(record: RequestRecord, max_draft: int) -> Iterator[_Cut]:
    whole, begin = record.output_tokens, 0
    for size in record.chunk_sizes:
        places = range(begin, begin + size - 1) if max_draft else range(begin, begin + size)
        for place in places:
            if whole[place] not in whole[:place]:
                yield _Cut(record.prompt_tokens, whole, place)
        begin += size


def declaring(subject: Subject) -> Callable[[int], Generate]:
    if subject.with_eos is None:
        raise NotTested("the EOS of this engine cannot be declared")
    return subject.with_eos


# The contracts: each returns a sentence, or raises


def length_limits(subject: Subject) -> str:
    """Give exactly max_new_tokens tokens, for each of 1 .. k + 3, the beginning of the longer output."""
    longest = serve_all(subject, **GREEDY, max_new_tokens=subject.max_draft + 3)
    for limit in range(1, subject.max_draft + 4):
        for record, long in zip(serve_all(subject, **GREEDY, max_new_tokens=limit), longest, strict=True):
            _expect(record, long.output_tokens[:limit], "length", f"max_new_tokens {limit}")
            if len(record.output_tokens) != limit:
                raise Broken(f"max_new_tokens {limit}: {tokens_shown(record.output_tokens)}")
    return f"outputs of 1 to {subject.max_draft + 3} tokens have exactly that length"


def eos_in_accepted_run(subject: Subject) -> str:
    """End at an EOS in mid-run, keep it as the last token, and emit nothing accepted after it."""
    declare, cuts = declaring(subject), find_cuts(subject)
    for cut in cuts:
        record = serve_one(subject, declare(cut.token), cut.prompt, temperature=0.0, ignore_eos=False)
        _expect(record, cut.kept, "eos", f"EOS {cut.token} at position {cut.place}")
    return f"{len(cuts)} texts end at an EOS" + (" inside an accepted run" if subject.max_draft else "")


def stop_ids(subject: Subject) -> str:
    """End at a stop token of the request itself, kept as the last token."""
    cuts = find_cuts(subject)
    requests = [
        made_request(subject, i, cut.prompt, **GREEDY, stop_token_ids=(cut.token,))
        for i, cut in enumerate(cuts)
    ]
    for record, cut in zip(served(subject.generate, requests), cuts, strict=True):
        _expect(record, cut.kept, "stop", f"stop id {cut.token} at position {cut.place}")
    return f"{len(cuts)} texts of one batch end at their own stop ids"


def ignore_eos(subject: Subject) -> str:
    """Go on past an EOS when asked to."""
    declare, cuts = declaring(subject), find_cuts(subject)
    for cut in cuts:
        record = serve_one(subject, declare(cut.token), cut.prompt, **GREEDY)
        _expect(record, cut.whole, "length", f"EOS {cut.token} ignored")
    return f"{len(cuts)} texts go on past an EOS that is ignored"


def finish_reasons(subject: Subject) -> str:
    """Say 'eos' where an EOS is the last token of the budget, and 'length' where it would have been next."""
    declare, cuts = declaring(subject), find_cuts(subject)
    for cut in cuts:
        generate = declare(cut.token)
        for limit in (cut.place + 1, cut.place):
            if limit:
                reason: FinishReason = "eos" if limit > cut.place else "length"
                changes = {"temperature": 0.0, "ignore_eos": False, "max_new_tokens": limit}
                record = serve_one(subject, generate, cut.prompt, **changes)
                _expect(record, cut.whole[:limit], reason, f"EOS at {cut.place}, limit {limit}")
    return f"right at {len(cuts)} texts that end with their budget or one token later"


def usage_counts(subject: Subject) -> str:
    """Count as many tokens as there are, and return the prompt that was sent."""
    for record, prompt in zip(serve_all(subject, **SAMPLED), subject.prompts, strict=True):
        if record.prompt_tokens != prompt:
            raise Broken(f"request {record.request} returns another prompt than was sent")
        if sum(record.chunk_sizes) != len(record.output_tokens) or not all(record.chunk_sizes):
            raise Broken(f"request {record.request}: chunks {record.chunk_sizes} of {record.output_tokens}")
        if len(record.chunk_times) != len(record.chunk_sizes):
            raise Broken(f"request {record.request}: some chunks have no time")
    return "chunks hold exactly the tokens of their output"


def distinct_samples(subject: Subject) -> str:
    """Give different outputs for different seeds: on some prompt, all samples differ.

    Prompts whose continuation is nearly certain repeat themselves rightly; `collisions` weighs that.
    """
    most = 0
    for prompt in subject.prompts:
        requests = [made_request(subject, i, prompt, **SAMPLED, seed=31 + i) for i in range(SAMPLES)]
        outputs = {record.output_tokens for record in served(subject.generate, requests)}
        most = max(most, len(outputs))
    if most < SAMPLES:
        raise Broken(f"at most {most} of {SAMPLES} samples of a prompt differ, under different seeds")
    return f"{SAMPLES} samples of one prompt under different seeds all differ"


def seeds(subject: Subject) -> str:
    """Give the same output under the same seed; that of ordinary decoding where that is claimed."""
    first = serve_all(subject, **SAMPLED)
    _equal(first, serve_all(subject, **SAMPLED), "the same seed twice")
    if not subject.repeats_ordinary:
        return "the same seeds give the same outputs"
    if subject.ordinary is None:
        raise NotTested("there is no ordinary decoding to compare with")
    _equal(first, serve_all(subject, subject.ordinary, **SAMPLED), "the same seed in ordinary decoding")
    return "the same seeds give the same outputs, also in ordinary decoding"


def second_call(subject: Subject) -> str:
    """Leave nothing behind: the same call again, after others, gives the same."""
    kinds = (GREEDY, SAMPLED) if subject.counter_seeds else (GREEDY,)
    before = [serve_all(subject, **kind) for kind in kinds]
    reverse = replace(subject, prompts=subject.prompts[::-1])
    serve_all(reverse, **{**SAMPLED, "seed": 1, "max_new_tokens": subject.max_draft + 1})
    for kind, records in zip(kinds, before, strict=True):
        _equal(records, serve_all(subject, **kind), "the same call again")
    return "a call repeated after another gives the same outputs"


def alone_or_in_a_batch(subject: Subject) -> str:
    """Let neighbours change nothing: unlike requests in one batch give what each gives alone."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.5, "top_k": 4},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05},
    )
    requests = [
        made_request(
            subject, i, prompt, **{**kinds[(i + shift) % len(kinds)], "seed": 50 + i, "ignore_eos": True}
        )
        for shift in range(2)
        for i, prompt in enumerate(subject.prompts, start=shift * len(subject.prompts))
    ]
    together = served(subject.generate, requests)
    compared = 0
    for request, record in zip(requests, together, strict=True):
        if request.sampling.temperature == 0 or subject.counter_seeds:
            _equal([record], served(subject.generate, [request]), "in a batch and alone")
            compared += 1
    return f"{compared} requests give alone what they give in a batch of unlike ones"


def logit_bias(subject: Subject) -> str:
    """Emit nothing but a token with a bias of +100, and never one with -100."""
    _require(subject, "logit_bias")
    plain = [record.output_tokens for record in serve_all(subject, **GREEDY)]
    seen = list(dict.fromkeys(token for output in plain for token in output))
    for kind in (GREEDY, SAMPLED):
        for record in serve_all(subject, **kind, logit_bias=((seen[-1], 100.0),)):
            if set(record.output_tokens) != {seen[-1]}:
                raise Broken(f"bias +100 on {seen[-1]}: {tokens_shown(record.output_tokens)}")
        banned = {output[0] for output in plain}
        for record in serve_all(subject, **kind, logit_bias=tuple((token, -100.0) for token in banned)):
            if emitted := banned.intersection(record.output_tokens):
                raise Broken(f"bias -100 on {min(emitted)}, and it was emitted")
    return "a bias of +100 forces its token, one of -100 forbids it"


def _penalty(parameter: str, value: float) -> Callable[[Subject], str]:
    def contract(subject: Subject) -> str:
        _require(subject, parameter)
        if subject.ordinary is None:
            raise NotTested("there is no ordinary decoding to compare with")
        changes: dict[str, Any] = {**GREEDY, parameter: value}
        expected = serve_all(subject, subject.ordinary, **changes)
        plain = serve_all(subject, subject.ordinary, **GREEDY)
        if all(a.output_tokens == b.output_tokens for a, b in zip(expected, plain, strict=True)):
            raise NotTested(f"{parameter} {value:g} changes no output of ordinary decoding")
        _equal(
            serve_all(subject, **changes), expected, f"{parameter} {value:g}, here and in ordinary decoding"
        )
        return "greedy outputs are those of ordinary decoding"

    contract.__doc__ = f"Apply {parameter} as ordinary decoding does, at every position of a run."
    return contract


def bad_words(subject: Subject) -> str:
    """Never emit a forbidden token, nor a forbidden pair of tokens, also across the edge of a round."""
    _require(subject, "bad_words")
    outputs = [record.output_tokens for record in serve_all(subject, **GREEDY)]
    pairs = [output[i : i + 2] for output in outputs for i in (0, 1) if len(output) > i + 1]
    words = ((outputs[0][-1],), *(pair for pair in pairs if outputs[0][-1] not in pair))
    for kind in (GREEDY, SAMPLED):
        for record in serve_all(subject, **kind, bad_words=words):
            text = record.output_tokens
            for word in words:
                if any(text[i : i + len(word)] == word for i in range(len(text))):
                    raise Broken(f"the forbidden sequence {word} was emitted")
    return f"{len(words)} forbidden sequences never appear"


def min_new_tokens(subject: Subject) -> str:
    """Emit no EOS among the first min_new_tokens tokens."""
    _require(subject, "min_new_tokens")
    declare, cuts = declaring(subject), find_cuts(subject)
    for cut in cuts:
        least = cut.place + subject.max_draft + 2
        changes = {"temperature": 0.0, "ignore_eos": False, "min_new_tokens": least}
        record = serve_one(
            subject, declare(cut.token), cut.prompt, **{**changes, "max_new_tokens": least + 4}
        )
        if cut.token in record.output_tokens[:least] or len(record.output_tokens) < least:
            raise Broken(f"min_new_tokens {least}, EOS {cut.token}: {tokens_shown(record.output_tokens)}")
    return f"{len(cuts)} texts go on to their minimum past an EOS"


def stop_strings(subject: Subject) -> str:
    """End at the first token that completes a stop string, also one across the edge of a chunk."""
    _require(subject, "stop_strings")
    if subject.text is None:
        raise NotTested("there is no tokenizer to make text with")
    tried = 0
    for record in serve_all(subject, **GREEDY):
        tokens, edge = record.output_tokens, record.chunk_sizes[0]
        if edge >= len(tokens):
            continue
        before, after = subject.text(tokens[:edge]), subject.text(tokens[: edge + 1])
        string = before[-1:] + after[len(before) :][:1]
        ends = next(m for m in range(1, len(tokens) + 1) if string in subject.text(tokens[:m]))
        stopped = serve_one(
            subject, subject.generate, record.prompt_tokens, **{**GREEDY, "stop_strings": (string,)}
        )
        _expect(stopped, tokens[:ends], "stop", f"stop string {string!r}")
        tried += 1
    if not tried:
        raise NotTested("every output is one chunk")
    return f"{tried} texts end at a string across the edge of a chunk"


def grammar(subject: Subject) -> str:
    """Emit only what the grammar allows."""
    _require(subject, "grammar")
    if subject.grammar is None or subject.parses is None:
        raise NotTested("there is no grammar to try")
    for kind in (GREEDY, SAMPLED):
        changes = {**kind, "ignore_eos": False, "grammar": subject.grammar}
        for record in serve_all(subject, **changes):
            if not subject.parses(record.output_tokens):
                raise Broken(f"the grammar does not allow {tokens_shown(record.output_tokens)}")
    return "all outputs obey the grammar"


CONTRACTS: Mapping[str, Callable[[Subject], str]] = {
    "length limits": length_limits,
    "EOS in an accepted run": eos_in_accepted_run,
    "stop ids": stop_ids,
    "ignore EOS": ignore_eos,
    "finish reasons": finish_reasons,
    "usage counts": usage_counts,
    "distinct samples": distinct_samples,
    "seeds": seeds,
    "second call": second_call,
    "alone or in a batch": alone_or_in_a_batch,
    "logit bias": logit_bias,
    "repetition penalty": _penalty("repetition_penalty", 2.0),
    "presence penalty": _penalty("presence_penalty", 2.0),
    "frequency penalty": _penalty("frequency_penalty", 2.0),
    "bad words": bad_words,
    "min new tokens": min_new_tokens,
    "stop strings": stop_strings,
    "grammar": grammar,
}
