"""What users ask of every request beside temperature, length and seed: `name=value` read and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from specbench.errors import UsageError, did_you_mean
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
    if name == "grammar":
        return text
    try:
        return json.loads(text)
    except ValueError:
        if name == "stop_strings":
            return [text]
        raise UsageError(
            f"--sampling {name}={text} is not JSON",
            hint="""write numbers plainly, lists as '["a", "b"]', biases as '{"42": -100}'""",
        ) from None


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
