"""What users ask of every request beside temperature, length and seed: `name=value` read and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from specbench.errors import UsageError, did_you_mean
from specbench.grammar import parse_grammar
from specbench.records import SamplingParams

_ELSEWHERE = {
    "temperature": "--temperature",
    "max_new_tokens": "--max-new-tokens",
    "seed": "--seed",
    "logprobs": "the library: no report shows them",
    "order": "the engine, which declares its own",
}

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens."""


def parse_sampling(texts: Sequence[str]) -> dict[str, Any]:
    """Read `name=value` settings; values are JSON, or plain text for a string.

    Raises:
        UsageError: an unknown name, a value that is not JSON or has no meaning.
    """
    settings: dict[str, Any] = {}
    known = [field.name for field in fields(SamplingParams)]
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if name in _ELSEWHERE:
            raise UsageError(f"--sampling {name} is set by {_ELSEWHERE[name]}")
        if not equals or name not in known:
            free = [n for n in known if n not in _ELSEWHERE]
            raise UsageError(
                f"cannot read --sampling '{text}': expected name=value{did_you_mean(name, free)}",
                hint=f"names: {', '.join(free)}",
            )
        settings[name] = _value(name, value)
    build_sampling(settings, encode=lambda _: (0,), max_new_tokens=1 << 30)
    return settings


def _value(name: str, text: str) -> Any:
    """Read a value and check its form; what it means is checked by `SamplingParams`."""
    if name == "grammar":
        return parse_grammar(text).text
    is_right, expected = _FORMS[name]
    try:
        value = json.loads(text)
    except ValueError:
        if name == "stop_strings":
            return [text]
        raise UsageError(
            f"--sampling {name}={text} is not JSON; expected {expected}",
            hint="""write numbers plainly, lists as '["a", "b"]', biases as '{"42": -100}'""",
        ) from None
    if not is_right(value):
        raise UsageError(f"--sampling {name}={text}: expected {expected}")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))


def _are_ids(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, list) and all(map(_is_whole, value)))


def _are_words(value: Any) -> bool:
    def is_word(word: Any) -> bool:
        return isinstance(word, str) or (isinstance(word, list) and _are_ids(word))

    return isinstance(value, list) and all(map(is_word, value))


def _are_biases(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(token.isdecimal() for token in value)
        and all(map(_is_number, value.values()))
    )


_WHOLE = (_is_whole, "a whole number")
_NUMBER = (_is_number, "a number")
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "top_k": _WHOLE,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "min_new_tokens": _WHOLE,
    "ignore_eos": (lambda value: isinstance(value, bool), "true or false"),
    "stop_token_ids": (_are_ids, "a token id, or a list of them"),
    "stop_strings": (_are_texts, "a text, or a list of texts"),
    "bad_words": (_are_words, "a list of words, each a text or a list of token ids"),
    "logit_bias": (_are_biases, 'an object from token ids to numbers, such as {"42": -100}'),
}
"""What a value may be, and how that is worded; `grammar` is read by `parse_grammar`."""


def build_sampling(
    settings: Mapping[str, Any], *, encode: Encode, max_new_tokens: int, **own: Any
) -> SamplingParams:
    """Make the parameters of a request from what was asked for and what is its own.

    Words are tokenised as they stand; `min_new_tokens` is cut to the request's `max_new_tokens`.

    Raises:
        UsageError: a value without meaning, named.
    """
    values = dict(settings)
    try:
        for name in ("stop_strings", "stop_token_ids"):
            if name in values:
                listed = values[name]
                values[name] = (listed,) if isinstance(listed, str | int) else tuple(listed)
        if "logit_bias" in values:
            pairs = values["logit_bias"].items()
            values["logit_bias"] = tuple((int(token), float(bias)) for token, bias in pairs)
        if "bad_words" in values:
            words = values["bad_words"]
            values["bad_words"] = tuple(tuple(encode(w) if isinstance(w, str) else w) for w in words)
        if "min_new_tokens" in values:
            values["min_new_tokens"] = min(values["min_new_tokens"], max_new_tokens)
        return SamplingParams(max_new_tokens=max_new_tokens, **{**values, **own})
    except (TypeError, AttributeError, ValueError) as problem:
        raise UsageError(f"--sampling: {problem}") from None
