"""Names to files: which strategies, policies and engines exist, found without importing any of them.

A file's stem is the name users type, underscores as hyphens. A module declares a frozen dataclass
`Options` (its `key=value` options, their types and defaults) and a function `build`. Packages elsewhere
add names through the entry point groups `specbench.strategies`, `specbench.policies`, `specbench.engines`.

An option may itself be the spec of another kind, written with brackets: `draft:k=4,policy=ema(warmup=20)`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from specbench.errors import UsageError, did_you_mean

KINDS = {"strategy": "strategies", "policy": "policies", "engine": "engines", "fault": "audit/faults"}

PolicySpec = Annotated[str, "policy"]
"""The type of an option that is the spec of a length policy: `name` or `name(key=value,...)`."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A configuration as users write it, kept as one string everywhere.

    It is `name:key=value,...`, or inside of another one `name(key=value,...)`: then `nested`.
    """

    name: str
    options: Mapping[str, str]
    nested: bool = False

    def __str__(self) -> str:
        """Return the string this was parsed from, options in the order given."""
        if not self.options:
            return self.name
        inner = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}({inner})" if self.nested else f"{self.name}:{inner}"


def parse(text: str) -> Spec:
    """Parse `name:key=value,key=value`; what stands in brackets is part of a value."""
    name, colon, rest = text.strip().partition(":")
    if not name:
        raise UsageError(f"'{text}' names nothing: expected name or name:key=value,...")
    example = "write options as name:key=value,key=value, for example ngram:k=5,max=4"
    return Spec(name, _pairs(rest, text, example) if colon else {})


def parse_nested(text: str) -> Spec:
    """Parse `name` or `name(key=value,key=value)`, the value of an option that is itself a spec."""
    name, bracket, rest = text.strip().partition("(")
    example = "write name or name(key=value,key=value), for example policy=ema(warmup=20)"
    inner = rest.removesuffix(")")
    if not name or (bracket and inner == rest) or set(name) & set(":=,)"):
        raise UsageError(f"cannot read '{text}': expected name or name(key=value,...)", hint=example)
    return Spec(name, _pairs(inner, text, example) if inner else {}, nested=True)


def _pairs(inner: str, text: str, example: str) -> dict[str, str]:
    """Read `key=value,key=value`, a part of `text`."""
    options: dict[str, str] = {}
    for part in _split(inner, text, example):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise UsageError(f"cannot read '{part}' in '{text}': expected key=value", hint=example)
        if key in options:
            raise UsageError(f"option '{key}' is given twice in '{text}'")
        options[key] = value
    return options


def _split(inner: str, text: str, example: str) -> list[str]:
    """Split at the commas that stand outside of brackets."""
    parts, depth = [""], 0
    for character in inner:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise UsageError(f"the brackets in '{text}' do not match", hint=example)
    return parts


def names(kind: str) -> list[str]:
    """List the names of one kind; imports nothing."""
    folder = Path(__file__).parent / KINDS[kind]
    found = {path.stem.replace("_", "-") for path in folder.glob("*.py")} - {"--init--"}
    # A module whose name starts with an underscore is shared by the others, not one of them.
    found = {name for name in found if not name.startswith("-") and name != "base"}
    return sorted(found | set(_entry_points(kind)))


def _entry_points(kind: str) -> dict[str, importlib.metadata.EntryPoint]:
    points = importlib.metadata.entry_points(group=f"specbench.{KINDS[kind].replace('/', '.')}")
    return {point.name: point for point in points}


def module(kind: str, name: str) -> types.ModuleType:
    """Import the module behind a name."""
    known = names(kind)
    if name not in known:
        raise UsageError(
            f"no {kind} '{name}'{did_you_mean(name, known)}",
            hint=f"known: {', '.join(known)}",
        )
    external = _entry_points(kind)
    if name in external:
        loaded = external[name].load()
        assert isinstance(loaded, types.ModuleType)
        return loaded
    folder = KINDS[kind].replace("/", ".")
    return importlib.import_module(f"specbench.{folder}.{name.replace('-', '_')}")


def options(kind: str, spec: Spec) -> Any:
    """Build the `Options` of a spec, converting each value to its declared type."""
    cls = module(kind, spec.name).Options
    hints = typing.get_type_hints(cls, include_extras=True)
    known = {field.name: field for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for key, text in spec.options.items():
        name = key.replace("-", "_")
        if name not in known:
            listing = ", ".join(known) or "none"
            raise UsageError(
                f"{kind} '{spec.name}' has no option '{key}'{did_you_mean(name, known)}",
                hint=f"its options: {listing}",
            )
        values[name] = _convert(kind, spec, key, text, hints[name])
    try:
        return cls(**values)
    except TypeError as problem:
        missing = [n for n, f in known.items() if _required(f) and n not in values]
        raise UsageError(
            f"{kind} '{spec.name}' needs {', '.join(missing) or problem}",
            hint=f"for example {spec.name}:{','.join(f'{n}=...' for n in missing)}",
        ) from None
    except ValueError as problem:
        raise UsageError(f"{kind} '{spec}': {problem}", hint=_usual(spec.name, cls)) from None


_KINDS_OF_VALUES = {int: "a whole number", float: "a number", bool: "true or false"}


def _usual(name: str, cls: Any) -> str:
    """Return a hint that writes out the options with their defaults; those without one are dots."""
    written = []
    for field in dataclasses.fields(cls):
        value = "..." if field.default is dataclasses.MISSING else field.default
        written.append(f"{field.name}={str(value).lower() if isinstance(value, bool) else value}")
    return f"the defaults are {name}:{','.join(written)}" if written else f"write {name} without options"


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(kind: str, spec: Spec, key: str, text: str, hint: Any) -> Any:
    choices = typing.get_args(hint)
    if hint == PolicySpec:
        options("policy", parse_nested(text))  # raises, with the near miss, where something is unknown
        return text
    if typing.get_origin(hint) is typing.Literal:
        if text not in choices:
            raise UsageError(
                f"{kind} '{spec.name}': {key}={text} is not one of {', '.join(choices)}"
                + did_you_mean(text, choices),
                hint=f"for example {spec.name}:{key}={choices[0]}",
            )
        return text
    if isinstance(hint, types.UnionType):  # `X | None`
        hint = next(choice for choice in choices if choice is not type(None))
    try:
        if hint is bool:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
                text.lower()
            ]
        return hint(text)
    except (ValueError, KeyError):
        raise UsageError(
            f"{kind} '{spec.name}': {key}={text} is not {_KINDS_OF_VALUES.get(hint, hint.__name__)}",
            hint=_usual(spec.name, module(kind, spec.name).Options),
        ) from None
