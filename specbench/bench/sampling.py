"""What users ask of every request beside temperature, length and seed: `name=value` read and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specbench.errors import UsageError, did_you_mean
from specbench.grammar import parse_grammar
from specbench.records import SamplingParams

_ELSEWHERE = {
    "temperature": "use --temperature",
    "max_new_tokens": "use --max-new-tokens",
    "seed": "use --seed",
    "logprobs": "no report shows them",
    "order": "every engine has its own",
}

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens."""


def parse_sampling(texts: Sequence[str]) -> dict[str, Any]:
    """Read `name=value` settings.

    A list is JSON, `["a", "b"]`, or a single value; biases are a JSON object, `{"42": -100}`.

    Raises:
        UsageError: an unknown name, one given twice, a value of another type or without meaning.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name, value = name.strip().replace("-", "_"), value.strip()
        if name in _ELSEWHERE:
            raise UsageError(f"--sampling {name}: {_ELSEWHERE[name]}")
        if not equals or name not in _READERS:
            near = "" if name in _READERS else did_you_mean(name, _READERS)
            raise UsageError(
                f"cannot read --sampling '{text}': expected NAME=VALUE{near}",
                hint=f"names: {', '.join(_READERS)}",
            )
        if name in settings:
            raise UsageError(f"--sampling {name} is given twice", hint="several values are one JSON list")
        read, expected = _READERS[name]
        try:
            settings[name] = read(value)
        except (ValueError, KeyError, RecursionError):
            raise UsageError(f"--sampling {name}={value:.80}: expected {expected}") from None
    build_sampling(settings, encode=lambda _: (0,), max_new_tokens=1 << 30)
    return settings


def build_sampling(
    settings: Mapping[str, Any], *, encode: Encode, max_new_tokens: int, **own: Any
) -> SamplingParams:
    """Make the parameters of a request from what was asked for and what is its own, which goes first.

    Words are tokenised as they stand; `min_new_tokens` is cut to the request's `max_new_tokens`.

    Raises:
        UsageError: a value without meaning, named.
    """
    values = {**settings, **own}
    if "bad_words" in values:
        words = values["bad_words"]
        values["bad_words"] = tuple(tuple(encode(word)) if isinstance(word, str) else word for word in words)
    if "min_new_tokens" in values:
        values["min_new_tokens"] = min(values["min_new_tokens"], max_new_tokens)
    try:
        return SamplingParams(max_new_tokens=max_new_tokens, **values)
    except ValueError as problem:
        raise UsageError(f"--sampling: {problem}") from None


# Readers of values; each raises ValueError or KeyError where the text is something else.


def _flag(text: str) -> bool:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError("no count")
    return number


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _texts(text: str) -> tuple[str, ...]:
    items = _listed(json.loads(text) if text[:1] in ("[", '"') else text)
    if not all(isinstance(item, str) and item for item in items):
        raise ValueError("no texts")
    return tuple(items)


def _ids(text: str) -> tuple[int, ...]:
    return _checked_ids(_listed(json.loads(text)))


def _checked_ids(items: Any) -> tuple[int, ...]:
    if not (isinstance(items, list) and items and all(type(item) is int and item >= 0 for item in items)):
        raise ValueError("no ids")
    return tuple(items)


def _words(text: str) -> tuple[str | tuple[int, ...], ...]:
    items = _listed(json.loads(text) if text[:1] in ("[", '"') else text)
    return tuple(item if isinstance(item, str) and item else _checked_ids(item) for item in items)


def _biases(text: str) -> tuple[tuple[int, float], ...]:
    biases = json.loads(text)
    if not isinstance(biases, dict) or not all(type(bias) in (int, float) for bias in biases.values()):
        raise ValueError("no biases")
    return tuple((int(token), float(bias)) for token, bias in biases.items())


def _grammar(text: str) -> str:
    parse_grammar(text)
    return text


_NUMBER = (float, "a number")
_COUNT = (_count, "a whole number, 0 or more")
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "top_k": _COUNT,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "logit_bias": (_biases, """biases of token ids, as '{"42": -100}'"""),
    "bad_words": (_words, """words or lists of token ids, as '["one", [5, 7]]'"""),
    "min_new_tokens": _COUNT,
    "ignore_eos": (_flag, "true or false"),
    "stop_token_ids": (_ids, "token ids, as 7 or [7, 8]"),
    "stop_strings": (_texts, """texts, as END or '["END", "\\n"]'"""),
    "grammar": (_grammar, "a grammar"),
}
