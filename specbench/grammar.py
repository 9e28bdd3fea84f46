"""What a user may write to constrain an answer, and what llguidance is given for it.

    json:{"type": "object", ...}    a JSON document that validates against the schema
    regex:[A-Z]{2}-[0-9]{4}         a text that the expression matches as a whole
    choice:["yes", "no"]            one of the texts

A grammar is a set of texts, and says nothing about tokens: whichever way of cutting a permitted text into
tokens is permitted too. llguidance would rather prescribe its own where only one text can follow; that is
switched off (`no_forcing`), so that what may follow depends on the text alone and not on how it came about.
JSON is written on one line as `json.dumps` does, and a schema's properties come in its order: with free
white space a model could write blanks for ever. A schema's own `x-guidance` overrides that.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast, get_args

from specbench.errors import UsageError, did_you_mean

Kind = Literal["json", "regex", "choice"]

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FORMS = 'write json:{"type": ...}, regex:[0-9]+ or choice:["yes", "no"]'
_HINTS: dict[Kind, str] = {
    "json": "a schema is JSON in braces; docs/json_schema.md of llguidance lists what can be enforced",
    "regex": "the syntax is that of Rust's regex crate, without look-around and back-references",
    "choice": 'write the texts as a JSON list: choice:["yes", "no"]',
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that can be enforced: as the user wrote it, and as llguidance reads it.

    `choices` holds the texts of a choice, and is empty for the other kinds.
    """

    text: str
    kind: Kind
    source: str
    choices: tuple[str, ...] = ()


@functools.lru_cache(maxsize=1024)
def parse_grammar(text: str) -> Grammar:
    """Read a grammar and check all that can be checked without a tokenizer.

    Raises:
        UsageError: it has no known form, is malformed, uses what cannot be enforced, or permits no text.
    """
    kind, colon, body = text.partition(":")
    if not colon or kind not in get_args(Kind):
        near = did_you_mean(kind, get_args(Kind)) if len(kind) < 20 else ""
        raise UsageError(f"no kind of grammar '{_short(kind)}'{near}", hint=_FORMS)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"the grammar '{kind}:' holds half of a surrogate pair, which is not text",
            hint="write the character itself",
        ) from None
    if kind == "json":
        return _checked(Grammar(text, "json", _source("%json " + _schema(body))))
    if kind == "regex":
        if not body:
            _refuse("regex", "the expression is empty")
        return _checked(Grammar(text, "regex", _source(_pattern(body))))
    choices = _choices(body)
    pattern = "|".join(_escaped(choice) for choice in choices)
    return _checked(Grammar(text, "choice", _source(_pattern(pattern)), choices))


def _source(body: str) -> str:
    lark = f'%llguidance {{"no_forcing": true}}\nstart: {body}'
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _pattern(expression: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(expression, use_ascii='d')}/"


def _schema(body: str) -> str:
    """Return the schema as JSON text with the layout of documents added."""
    schema = _json("json", body)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        _refuse("json", "a schema is an object in braces")
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        _refuse("json", "x-guidance is an object in braces")
    return json.dumps({**schema, "x-guidance": {**_LAYOUT, **own}})


def _choices(body: str) -> tuple[str, ...]:
    """Return the texts to choose from: at least one, none empty, none twice."""
    listed = _json("choice", body)
    if not isinstance(listed, list) or not all(isinstance(choice, str) for choice in listed):
        _refuse("choice", "expected a list of texts")
    choices = cast("list[str]", listed)
    if not choices:
        _refuse("choice", "there is nothing to choose from")
    if "" in choices:
        _refuse("choice", "one of the texts is empty")
    if len(set(choices)) < len(choices):
        _refuse("choice", "a text is listed twice")
    return tuple(choices)


def _json(kind: Kind, body: str) -> Any:
    try:
        return json.loads(body, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        _refuse(kind, f"invalid JSON: {error.msg} (column {error.colno})")
    except (ValueError, RecursionError) as error:  # NaN, a number of thousands of digits, deep nesting
        _refuse(kind, f"invalid JSON: {error}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _escaped(text: str) -> str:
    """Return an expression that matches only this text."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&~-])", r"\\\1", text)


def _checked(grammar: Grammar) -> Grammar:
    """Return the grammar if llguidance can enforce it."""
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar.source)
    if failed:
        _refuse(grammar.kind, reason(messages[0]))
    return grammar


def reason(message: str) -> str:
    """Return what a message of llguidance says, on one line, without its excerpt of our own wrapping."""
    message = re.split(r"\n(?: +1 \| |<state>)", message)[0]
    _, marker, last = message.rpartition("error: ")
    if not marker:
        last = re.sub(r"^at \d+\(\d+\): ", "", message).rpartition(" (in regex): ")[2]
    last = last.removeprefix("failed to compile JSON schema: ")
    return " ".join(last.split())


def _refuse(kind: Kind, what: str) -> NoReturn:
    raise UsageError(f"the grammar '{kind}:' cannot be used: {what}", hint=_HINTS[kind])


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
