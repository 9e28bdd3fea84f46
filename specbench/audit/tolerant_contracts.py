"""The contracts where numbers are not exact: what a decoder owes its callers whatever its logits round to.

Two correct greedy outputs of one prompt may part at a near-tie as soon as batch or width differ, so nothing
here compares one output with another that was decoded otherwise. What must hold within an output (it ends
where it has to, and says why) is checked in full.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from specbench.audit import contracts
from specbench.audit.contracts import Broken, ContractResult, NotTested, Subject
from specbench.records import FinishReason, RequestRecord

UNCHANGED = (
    "usage counts",
    "distinct samples",
    "seeds",
    "every bit of a seed",
    "fresh numbers",
    "second call",
    "logit bias",
    "bad words",
    "min new tokens",
    "grammar",
)
"""Contracts that compare nothing with a computation of another shape. `seeds` and `second call` repeat a call
exactly, which gives the same numbers in any precision."""

LEFT_OUT = (
    "EOS after an accepted run",
    "alone or in a batch",
    "neighbours",
    "sharp sampling",
    "repetition penalty",
    "presence penalty",
    "frequency penalty",
)
"""Contracts that compare tokens with those of another batch or of ordinary decoding: float32's."""


def length_limits(subject: Subject) -> str:
    """Give exactly max_new_tokens tokens, for each of 1 .. k + 3."""
    for limit in range(1, subject.max_draft + 4):
        for record in contracts.serve_all(subject, **contracts.GREEDY, max_new_tokens=limit):
            _ends_right(record, (), limit, "eos", f"max_new_tokens {limit}")
    return f"outputs of 1 to {subject.max_draft + 3} tokens have exactly that length"


def eos_in_accepted_run(subject: Subject) -> str:
    """End at an EOS in mid-run, and emit nothing after it."""
    return _eos_ends(subject, lambda place: subject.length)


def finish_reasons(subject: Subject) -> str:
    """Say 'eos' where an EOS is the last token of the budget, and 'length' where there is none."""
    return _eos_ends(subject, lambda place: place + 1)


def _eos_ends(subject: Subject, limit_of: Callable[[int], int]) -> str:
    """Declare tokens that greedy outputs have as EOS, and see that outputs end there."""
    declare, ended = contracts.declaring(subject), 0
    for cut in contracts.find_cuts(subject):
        limit = limit_of(cut.place)
        changes: dict[str, Any] = {"temperature": 0.0, "ignore_eos": False, "max_new_tokens": limit}
        record = contracts.serve_one(subject, declare(cut.token), cut.prompt, **changes)
        ended += _ends_right(record, (cut.token,), limit, "eos", f"EOS {cut.token}")
    if not ended:
        raise NotTested("no output came to a token that was declared as EOS")
    return f"{ended} texts end at an EOS and say so"


def stop_ids(subject: Subject) -> str:
    """End at a stop token of the request itself, and emit nothing after it."""
    cuts = contracts.find_cuts(subject)
    requests = [
        contracts.made_request(subject, i, cut.prompt, **contracts.GREEDY, stop_token_ids=(cut.token,))
        for i, cut in enumerate(cuts)
    ]
    ended = sum(
        _ends_right(record, (cut.token,), subject.length, "stop", f"stop id {cut.token}")
        for record, cut in zip(contracts.served(subject.generate, requests), cuts, strict=True)
    )
    if not ended:
        raise NotTested("no output came to its stop id")
    return f"{ended} texts of one batch end at their own stop ids"


def ignore_eos(subject: Subject) -> str:
    """Go on past an EOS when asked to, to the limit."""
    declare, passed = contracts.declaring(subject), 0
    for cut in contracts.find_cuts(subject):
        record = contracts.serve_one(subject, declare(cut.token), cut.prompt, **contracts.GREEDY)
        _ends_right(record, (), subject.length, "eos", f"EOS {cut.token} ignored")
        passed += cut.token in record.output_tokens[:-1]
    if not passed:
        raise NotTested("no output came to a token that was declared as EOS")
    return f"{passed} texts go on past an EOS that is ignored"


def stop_strings(subject: Subject) -> str:
    """End at the first token that completes a stop string, also one across the edge of a chunk."""
    if subject.text is None:
        raise NotTested("there is no tokenizer to make text with")
    ended = 0
    for record in contracts.serve_all(subject, **contracts.GREEDY):
        tokens, edge = record.output_tokens, record.chunk_sizes[0]
        if edge >= len(tokens):
            continue
        before, after = subject.text(tokens[:edge]), subject.text(tokens[: edge + 1])
        string = before[-1:] + after[len(before) :][:1]
        changes = {**contracts.GREEDY, "stop_strings": (string,)}
        stopped = contracts.serve_one(subject, subject.generate, record.prompt_tokens, **changes)
        if string in subject.text(stopped.output_tokens[:-1]):
            raise Broken(f"stop string {string!r}: the text goes on behind it")
        if string in subject.text(stopped.output_tokens):
            ended += 1
            if stopped.finish_reason != "stop":
                raise Broken(f"stop string {string!r}: finish reason '{stopped.finish_reason}'")
        else:
            _ends_right(stopped, (), subject.length, "stop", f"stop string {string!r} never came")
    if not ended:
        raise NotTested("no output came to its stop string")
    return f"{ended} texts end at a string across the edge of a chunk"


def _ends_right(
    record: RequestRecord, ends: Collection[int], limit: int, reason: FinishReason, case: str
) -> bool:
    """Return whether an output came to one of its ends; it must then be over, and else be `limit` long."""
    output = record.output_tokens
    shown = contracts.tokens_shown(output)
    if any(token in ends for token in output[:-1]):
        raise Broken(f"{case}: {shown} go on behind it")
    ended = bool(output) and output[-1] in ends
    if not ended and len(output) != limit:
        raise Broken(f"{case}: {shown}; expected {limit}")
    expected = reason if ended else "length"
    if record.finish_reason != expected:
        raise Broken(f"{case}: finish reason '{record.finish_reason}'; expected '{expected}'")
    return ended


TOLERANT: Mapping[str, Callable[[Subject], str]] = {
    "length limits": length_limits,
    "EOS in an accepted run": eos_in_accepted_run,
    "stop ids": stop_ids,
    "ignore EOS": ignore_eos,
    "finish reasons": finish_reasons,
    "stop strings": stop_strings,
}


def check(subject: Subject) -> tuple[ContractResult, ...]:
    """Ask of a decoder what it owes in any precision; see `contracts.check` for the null hypothesis.

    Invalid only where the same call twice gives different numbers, as kernels that add in no fixed order do.
    """
    # Without ordinary decoding to compare with: its tokens may part from these at a near-tie.
    unchanged = contracts.check(replace(subject, ordinary=None), UNCHANGED)
    return (*unchanged, *(contracts.asked(name, TOLERANT[name], subject) for name in TOLERANT))
