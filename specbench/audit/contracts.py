"""What every decoder owes its callers exactly, whatever it samples: lengths, stops, seeds, parameters.

Each contract is asked of a callable that serves requests and returns their records, so of any engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, islice, pairwise
from typing import Any

from specbench.audit.greedy_regret import first_difference
from specbench.audit.verdicts import ComponentResult
from specbench.records import FinishReason, Request, RequestRecord, SamplingParams

Generate = Callable[[Sequence[Request]], Sequence[RequestRecord]]
"""Serves some requests together, and returns one record for each, in any order."""

SAMPLES = 6
CUTS = 4
"""Places at which a text is stopped, at most, over all prompts."""
STRINGS = 2
"""Stop strings tried of each prompt, for each place in a run where they may end."""
SEED_BITS = (0, 7, 15, 16, 31, 32, 40, 47, 54)
"""Bits of a seed that must matter; where an engine keeps half of a seed, the others do not."""
FLAT, FLAT_TOKENS, FLAT_CHANCE = 1e6, 48, 1e-12
"""A temperature at which all tokens are equally likely, how many are drawn, and the level."""
FEWEST_IDS = 16
"""With fewer tokens in the vocabulary pairs are far from Poisson; with these the level is below 1e-9."""
RENAMED = 1000
"""What is added to the number of a request to give it another."""


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
        eos_ids: The decoder's own, where they are known.
        drafts: Says how many tokens each round of each request of the last call was offered. Where a decoder
            chooses lengths by something else than the text, a seed alone does not make its output.
        kept: Greedy outputs by prompts, which many contracts start from.
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
    eos_ids: tuple[int, ...] = ()
    drafts: Callable[[], Mapping[int, Sequence[int]]] | None = None
    kept: dict[Any, list[RequestRecord]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def length(self) -> int:
        """Return the tokens of a long output: several rounds."""
        return max(20, 2 * (self.max_draft + 3))


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
DIVERSE: Mapping[str, Any] = {"temperature": 3.0, "ignore_eos": True}
"""Hot enough that two outputs are never equal by chance, whatever the prompt."""


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
    return serve_kinds(subject, [changes], generate)[0]


def serve_kinds(
    subject: Subject, kinds: Sequence[Mapping[str, Any]], generate: Generate | None = None
) -> list[list[RequestRecord]]:
    """Serve every prompt under each of some sets of parameters, all in one batch; return them by set."""
    prompts = subject.prompts
    requests = [
        made_request(subject, i + place * len(prompts), prompt, **{"seed": 7 + i, **changes})
        for place, changes in enumerate(kinds)
        for i, prompt in enumerate(prompts)
    ]
    records = served(generate or subject.generate, requests)
    return [records[start : start + len(prompts)] for start in range(0, len(records), len(prompts))]


def greedy_outputs(subject: Subject, generate: Generate | None = None) -> list[RequestRecord]:
    """Return the long output of every prompt at temperature 0, decoded once."""
    key = subject.prompts, generate
    if key not in subject.kept:
        subject.kept[key] = serve_all(subject, generate, **GREEDY)
    return subject.kept[key]


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


_Told = tuple[RequestRecord, Sequence[int]]
"""A record, and how many tokens each of its rounds was offered; nothing where that is not told."""


def _told(subject: Subject, records: Sequence[RequestRecord]) -> list[_Told]:
    """Put to the records of the last call what was drafted for them."""
    drafts = subject.drafts() if subject.drafts is not None else {}
    return [(record, drafts.get(record.request, ())) for record in records]


def _repeated(some: Sequence[_Told], others: Sequence[_Told], case: str) -> int:
    """Compare outputs that only random numbers could tell apart; return how many could be compared.

    Where lengths of drafts differ before the outputs do, other numbers were read, rightly.
    """
    compared = 0
    for (one, drafted), (other, drafted_there) in zip(some, others, strict=True):
        shorter = min(len(one.output_tokens), len(other.output_tokens))
        place = first_difference(one.output_tokens[:shorter], other.output_tokens[:shorter])
        if place is not None:
            rounds = 1 + _round_at(one.chunk_sizes, place)
            if tuple(drafted[:rounds]) != tuple(drafted_there[:rounds]):
                continue
        compared += 1
        _equal([one], [other], case)
    return compared


def _round_at(sizes: Sequence[int], place: int) -> int:
    """Return the number of the chunk that holds a token."""
    ends = list(accumulate(sizes))
    return next((number for number, end in enumerate(ends) if place < end), len(ends))


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


def find_cuts(subject: Subject, *, at_end: bool = False) -> list[_Cut]:
    """Find places to stop: with drafts, such that an accepted run goes on beyond them, or ends with them."""
    found = [
        list(islice(_cuts_of(record, subject.max_draft, at_end=at_end), CUTS))
        for record in greedy_outputs(subject)
    ]
    # One of each prompt in turn, so that a few cuts meet all prompts.
    by_turn = [cuts[turn] for turn in range(CUTS) for cuts in found if turn < len(cuts)][:CUTS]
    if not by_turn:
        where = "as its last" if at_end else "before its end"
        raise NotTested(f"no accepted run of the greedy outputs has a new token {where}")
    return by_turn


def _cuts_of(record: RequestRecord, max_draft: int, *, at_end: bool) -> Iterator[_Cut]:
    whole, begin = record.output_tokens, 0
    for size in record.chunk_sizes:
        last = begin + size - 1
        places = range(begin, last) if max_draft else range(begin, begin + size)
        if at_end:
            places = range(last, last + int(size > 1 or not max_draft))
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
    limits = range(1, subject.max_draft + 4)
    found = serve_kinds(subject, [{**GREEDY, "max_new_tokens": limit} for limit in limits])
    for limit, records in zip(limits, found, strict=True):
        for record, long in zip(records, longest, strict=True):
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


def eos_after_accepted_run(subject: Subject) -> str:
    """End at an EOS that is the token after an accepted run: the bonus or the recovered one."""
    declare, cuts = declaring(subject), find_cuts(subject, at_end=True)
    for cut in cuts:
        record = serve_one(subject, declare(cut.token), cut.prompt, temperature=0.0, ignore_eos=False)
        _expect(record, cut.kept, "eos", f"EOS {cut.token} at position {cut.place}")
    return f"{len(cuts)} texts end at an EOS behind an accepted run"


def stop_ids(subject: Subject) -> str:
    """End at a stop token of the request itself, kept as the last token, wherever in a run it is."""
    cuts = [*find_cuts(subject), *_cuts_at_end(subject)]
    for spare in (None, 0, 1):
        limits = [subject.length if spare is None else len(cut.kept) + spare for cut in cuts]
        requests = [
            made_request(subject, i, cut.prompt, **GREEDY, stop_token_ids=(cut.token,), max_new_tokens=limit)
            for i, (cut, limit) in enumerate(zip(cuts, limits, strict=True))
        ]
        for record, cut, limit in zip(served(subject.generate, requests), cuts, limits, strict=True):
            case = f"stop id {cut.token} at position {cut.place}, limit {limit}"
            _expect(record, cut.kept, "stop", case)
    return f"{len(cuts)} texts of one batch end at their own stop ids"


def _cuts_at_end(subject: Subject) -> list[_Cut]:
    """Return the cuts at the last tokens of runs, none if there are none."""
    try:
        return find_cuts(subject, at_end=True)
    except NotTested:
        return []


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
    most = _distinct(subject, [31 + i for i in range(SAMPLES)])
    if most < SAMPLES:
        raise Broken(f"at most {most} of {SAMPLES} samples of a prompt differ, under different seeds")
    return f"{SAMPLES} samples of one prompt under different seeds all differ"


def _distinct(subject: Subject, wanted: Sequence[int]) -> int:
    """Return how many of some seeds give outputs of their own, on the prompt where most do.

    Raises:
        NotTested: Ordinary decoding's do not all differ either; then the law leaves too little to chance.
    """

    def most(generate: Generate) -> int:
        found = 0
        for prompt in subject.prompts:
            requests = [made_request(subject, i, prompt, **DIVERSE, seed=s) for i, s in enumerate(wanted)]
            outputs = {record.output_tokens for record in served(generate, requests)}
            found = max(found, len(outputs))
            if found == len(wanted):
                break
        return found

    own = most(subject.generate)
    if own < len(wanted) and subject.ordinary is not None and most(subject.ordinary) < len(wanted):
        raise NotTested("ordinary decoding gives equal outputs under different seeds too")
    return own


def seeds(subject: Subject) -> str:
    """Give the same output under the same seed; that of ordinary decoding where that is claimed."""
    first = serve_all(subject, **SAMPLED)
    told = _told(subject, first)
    again = serve_all(subject, **SAMPLED)
    if not _repeated(told, _told(subject, again), "the same seed twice"):
        raise NotTested("draft lengths differ from call to call, and with them the random numbers")
    if not subject.repeats_ordinary:
        return "the same seeds give the same outputs"
    if subject.ordinary is None:
        raise NotTested("there is no ordinary decoding to compare with")
    _equal(first, serve_all(subject, subject.ordinary, **SAMPLED), "the same seed in ordinary decoding")
    return "the same seeds give the same outputs, also in ordinary decoding"


def every_bit_of_a_seed(subject: Subject) -> str:
    """Give different outputs for seeds that differ in one bit, on some prompt, and forget no high bit."""
    base = 0x2B_7E15_1628_AED3
    wanted = [base, *(base ^ (1 << bit) for bit in SEED_BITS)]
    most = _distinct(subject, wanted)
    if most < len(wanted):
        raise Broken(f"at most {most} of {len(wanted)} seeds that differ in one bit each give another output")
    return f"{len(wanted)} seeds that differ in one bit each give different outputs"


def fresh_numbers(subject: Subject) -> str:
    """Draw every token with numbers of its own: where all tokens are equally likely, few come twice.

    At a temperature that leaves nothing of the logits, equal tokens at two places of an output are a chance
    of one in the vocabulary. Random numbers that begin again every round, or after some tokens, bring the
    same tokens again. The vocabulary is taken to end at the largest token seen, which only excuses more.
    """
    flat = SamplingParams(temperature=FLAT, ignore_eos=True, max_new_tokens=FLAT_TOKENS)
    requests = [
        Request(i, prompt, replace(flat, seed=101 + i), f"contract-{i}")
        for i, prompt in enumerate(subject.prompts)
    ]
    outputs = [record.output_tokens for record in served(subject.generate, requests)]
    vocab = 1 + max((token for output in outputs for token in output), default=0)
    if vocab < FEWEST_IDS:
        raise NotTested(f"only {vocab} tokens: equal ones tell nothing")
    expected = sum(len(output) * (len(output) - 1) / 2 for output in outputs) / vocab
    pairs = sum(n * (n - 1) // 2 for output in outputs for n in Counter(output).values())
    # Pairs are nearly Poisson: beyond mean + x with chance below exp(-x^2 / (2 mean + 2 x / 3)), Bernstein.
    beyond = max(0.0, pairs - expected)
    if beyond**2 > -math.log(FLAT_CHANCE) * (2 * expected + 2 * beyond / 3):
        raise Broken(
            f"with all tokens equally likely, {pairs} pairs of places have equal tokens; "
            f"about {expected:.1f} expected: random numbers come again"
        )
    return f"{pairs} pairs of equal tokens where all are equally likely, about {expected:.1f} expected"


def second_call(subject: Subject) -> str:
    """Leave nothing behind: the same call again, after others, gives the same."""
    kinds = (GREEDY, SAMPLED) if subject.counter_seeds else (GREEDY,)
    before = [_told(subject, serve_all(subject, **kind)) for kind in kinds]
    reverse = replace(subject, prompts=subject.prompts[::-1])
    serve_all(reverse, **{**SAMPLED, "seed": 1, "max_new_tokens": subject.max_draft + 1})
    for kind, told in zip(kinds, before, strict=True):
        after = serve_all(subject, **kind)
        if kind is GREEDY:
            _equal([record for record, _ in told], after, "the same call again")
        else:
            _repeated(told, _told(subject, after), "the same call again")
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
    together = _told(subject, served(subject.generate, requests))
    compared = 0
    for request, told in zip(requests, together, strict=True):
        # Under another number: outputs depend on what a request asks for, not on what it is called.
        renamed = replace(request, id=request.id + RENAMED)
        if request.sampling.temperature == 0:
            _equal([told[0]], served(subject.generate, [renamed]), "in a batch and alone")
            compared += 1
        elif subject.counter_seeds:
            alone = _told(subject, served(subject.generate, [renamed]))
            compared += _repeated([told], alone, "in a batch and alone")
    return f"{compared} requests give alone what they give in a batch of unlike ones"


def neighbours(subject: Subject) -> str:
    """Let each request keep its own parameters and its own end in a batch of unlike ones, as it does alone.

    At temperature 0, so that nothing depends on random numbers: biases, penalties, bad words, stop ids,
    least and most lengths, and whether an EOS ends the output.
    """
    plain = [record.output_tokens for record in greedy_outputs(subject)]
    first = subject.prompts[0], plain[0]
    tokens = list(dict.fromkeys(token for output in plain for token in output))
    middle = first[1][len(first[1]) // 3]
    least = min(subject.length, first[1].index(middle) + 4)
    kinds: list[dict[str, Any]] = [
        {"logit_bias": ((tokens[-1], 100.0),)},
        {},
        {"logit_bias": tuple((token, -100.0) for token in sorted({output[0] for output in plain}))},
        {"repetition_penalty": 2.0},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"bad_words": tuple((output[1],) for output in plain[:1])},
        {"max_new_tokens": subject.max_draft + 1},
        {"stop_token_ids": (middle,)},
        {"stop_token_ids": (middle,), "min_new_tokens": least},
        {"ignore_eos": False},
    ]
    known = {entry.name for entry in fields(subject.sampling)}
    generate = subject.with_eos(middle) if subject.with_eos is not None else subject.generate
    kinds = [kind for kind in kinds if set(kind) <= known]
    requests = [
        made_request(subject, i, subject.prompts[0], **{**GREEDY, **kind}) for i, kind in enumerate(kinds)
    ]
    alone = [served(generate, [request])[0] for request in requests]
    for order in (requests, requests[::-1]):
        together = {record.request: record for record in served(generate, order)}
        for request, kind, record in zip(requests, kinds, alone, strict=True):
            words = ", ".join(kind) or "no parameters"
            _expect(together[request.id], record.output_tokens, record.finish_reason, f"{words}, in a batch")
    return f"{len(kinds)} requests with unlike parameters give in a batch what they give alone"


def sharp_sampling(subject: Subject) -> str:
    """Sample the most likely token where top_k, top_p or min_p leave no other."""
    sharp = {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}
    _require(subject, *sharp)
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    found = serve_kinds(subject, [{**SAMPLED, **off, name: value} for name, value in sharp.items()])
    for (parameter, value), records in zip(sharp.items(), found, strict=True):
        _equal(records, greedy_outputs(subject), f"{parameter} {value:g}, and at temperature 0")
    return "top_k 1, top_p near 0 and min_p 1 sample what temperature 0 emits"


def logit_bias(subject: Subject) -> str:
    """Emit nothing but a token with a bias of +100, and never one with -100."""
    _require(subject, "logit_bias")
    plain = [record.output_tokens for record in greedy_outputs(subject)]
    seen = list(dict.fromkeys(token for output in plain for token in output))
    banned = {output[0] for output in plain}
    forced, forbidden = ((seen[-1], 100.0),), tuple((token, -100.0) for token in sorted(banned))
    kinds = [{**kind, "logit_bias": bias} for bias in (forced, forbidden) for kind in (GREEDY, SAMPLED)]
    found = serve_kinds(subject, kinds)
    for record in (*found[0], *found[1]):
        if set(record.output_tokens) != {seen[-1]}:
            raise Broken(f"bias +100 on {seen[-1]}: {tokens_shown(record.output_tokens)}")
    for record in (*found[2], *found[3]):
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
        plain = greedy_outputs(subject, subject.ordinary)
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
    outputs = [record.output_tokens for record in greedy_outputs(subject)]
    pairs = [output[i : i + 2] for output in outputs for i in (0, 1) if len(output) > i + 1]
    words = ((outputs[0][-1],), *(pair for pair in pairs if outputs[0][-1] not in pair))
    found = serve_kinds(subject, [{**kind, "bad_words": words} for kind in (GREEDY, SAMPLED)])
    for text in (record.output_tokens for records in found for record in records):
        for word in words:
            if any(text[i : i + len(word)] == word for i in range(len(text))):
                raise Broken(f"the forbidden sequence {word} was emitted")
    return f"{len(words)} forbidden sequences never appear"


def min_new_tokens(subject: Subject) -> str:
    """Emit neither EOS nor a stop id among the first min_new_tokens tokens."""
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
        stopping = {**GREEDY, "stop_token_ids": (cut.token,), "min_new_tokens": least}
        record = serve_one(subject, subject.generate, cut.prompt, **stopping, max_new_tokens=least + 4)
        if cut.token in record.output_tokens[:least] or len(record.output_tokens) < least:
            raise Broken(f"min_new_tokens {least}, stop id {cut.token}: {tokens_shown(record.output_tokens)}")
    return f"{len(cuts)} texts go on to their minimum past an EOS"


def stop_strings(subject: Subject) -> str:
    """End at the token that completes a stop string: across the edge of a chunk, in a run, at its end."""
    _require(subject, "stop_strings")
    if subject.text is None:
        raise NotTested("there is no tokenizer to make text with")
    wanted: list[tuple[RequestRecord, str, int]] = []
    for record in greedy_outputs(subject):
        found: dict[str, list[tuple[RequestRecord, str, int]]] = {}
        for string, ends in _strings(subject.text, record.output_tokens):
            found.setdefault(_where(record.chunk_sizes, ends), []).append((record, string, ends))
        wanted += (one for strings in found.values() for one in strings[:STRINGS])
    if not wanted:
        raise NotTested("no text holds two characters that come from two tokens")
    for spare in (subject.length, 1):
        requests = [
            made_request(
                subject,
                i,
                record.prompt_tokens,
                **GREEDY,
                stop_strings=(string,),
                max_new_tokens=min(subject.length, ends + spare),
            )
            for i, (record, string, ends) in enumerate(wanted)
        ]
        for stopped, (record, string, ends) in zip(served(subject.generate, requests), wanted, strict=True):
            _expect(stopped, record.output_tokens[:ends], "stop", f"stop string {string!r}")
    return f"{len(wanted)} texts end at a string across the edge of a chunk, in a run or at its end"


def _strings(text: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield strings of two characters from two tokens, and after how many tokens each is first complete.

    Only where the text grows token by token: not at parts of a character, nor at spaces, which a tokenizer
    may decode by what stands before.
    """
    texts = [text(tokens[:m]) for m in range(len(tokens) + 1)]
    if any("\ufffd" in part for part in texts):
        return
    if not all(after.startswith(before) for before, after in pairwise(texts)):
        return
    for before, after in pairwise(texts):
        string = before[-1:] + after[len(before) :][:1]
        if len(string) == 2 and not string[0].isspace():
            yield string, next(m for m, part in enumerate(texts) if string in part)


def _where(sizes: Sequence[int], ends: int) -> str:
    """Say where in its chunk the token lies after which a text ends."""
    number = _round_at(sizes, ends - 1)
    begin = sum(sizes[:number])
    if ends == begin + 1:
        return "first"
    return "last" if ends == begin + sizes[number] else "inside"


def grammar(subject: Subject) -> str:
    """Emit only what the grammar allows."""
    _require(subject, "grammar")
    if subject.grammar is None or subject.parses is None:
        raise NotTested("there is no grammar to try")
    for kind in (GREEDY, SAMPLED):
        changes = {**kind, "ignore_eos": False, "grammar": subject.grammar}
        found = serve_all(subject, **changes)
        for record in found:
            if not subject.parses(record.output_tokens):
                raise Broken(f"the grammar does not allow {tokens_shown(record.output_tokens)}")
        if kind is GREEDY and subject.ordinary is not None:
            expected = serve_all(subject, subject.ordinary, **changes)
            _equal(found, expected, "under a grammar, here and in ordinary decoding")
            # Under a bias that wants EOS, outputs end as soon as the grammar lets them.
            changes["logit_bias"] = tuple((token, 100.0) for token in subject.eos_ids)
            expected = serve_all(subject, subject.ordinary, **changes)
            _equal(
                serve_all(subject, **changes),
                expected,
                "the first end under a grammar, here and in ordinary decoding",
            )
    return "all outputs obey the grammar"


CONTRACTS: Mapping[str, Callable[[Subject], str]] = {
    "length limits": length_limits,
    "EOS in an accepted run": eos_in_accepted_run,
    "EOS after an accepted run": eos_after_accepted_run,
    "stop ids": stop_ids,
    "ignore EOS": ignore_eos,
    "finish reasons": finish_reasons,
    "usage counts": usage_counts,
    "distinct samples": distinct_samples,
    "seeds": seeds,
    "every bit of a seed": every_bit_of_a_seed,
    "fresh numbers": fresh_numbers,
    "second call": second_call,
    "alone or in a batch": alone_or_in_a_batch,
    "neighbours": neighbours,
    "sharp sampling": sharp_sampling,
    "logit bias": logit_bias,
    "repetition penalty": _penalty("repetition_penalty", 2.0),
    "presence penalty": _penalty("presence_penalty", 2.0),
    "frequency penalty": _penalty("frequency_penalty", 2.0),
    "bad words": bad_words,
    "min new tokens": min_new_tokens,
    "stop strings": stop_strings,
    "grammar": grammar,
}
