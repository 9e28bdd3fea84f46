"""The YAML header of a workload: its keys, their types, and the file of prompts that it names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from specbench.errors import WorkloadError, did_you_mean
from specbench.workloads.files import content_digest, read_prompts, read_text
from specbench.workloads.loads import Load
from specbench.workloads.rows import fail
from specbench.workloads.workload import Headline, Workload

TEMPERATURES = (0.0, 1.0)
MAX_NEW_TOKENS = 128
LOADS = (Load("closed", concurrency=1),)
HEADLINE: Headline = "decode"

KEYS = (
    "name",
    "description",
    "licence",
    "prompts",
    "sha256",
    "temperatures",
    "max_new_tokens",
    "loads",
    "headline",
    "without_grammar",
)


def read_workload(path: Path, source: str) -> Workload:
    """Read a header and the prompts that it names; only `prompts` is required.

    Raises:
        WorkloadError: Either file is missing or malformed, or the prompts do not have the hash that
            the header states.
    """
    header = _parse(path)
    where = str(path)
    for key in header:
        if key not in KEYS:
            near = did_you_mean(str(key), KEYS)
            fail(where, f"unknown key '{key}'{near}", f"known keys: {', '.join(KEYS)}")
    prompts_path = path.parent / _string(where, header, "prompts", None)
    text = read_text(prompts_path)
    digest = content_digest(text)
    stated = _string(where, header, "sha256", digest)
    if not re.fullmatch(r"[0-9a-f]{64}", stated):
        fail(where, "'sha256' must be 64 hexadecimal digits in quotes", f'sha256: "{digest}"')
    if stated != digest:
        fail(
            str(prompts_path),
            f"the prompts changed: their hash is not the one in {path.name}",
            f'if this was meant, update the header with sha256: "{digest}"',
        )
    prompts = read_prompts(prompts_path, text)
    return Workload(
        name=_string(where, header, "name", path.stem),
        description=_string(where, header, "description", f"Prompts from {prompts_path.name}"),
        licence=_string(where, header, "licence", "not stated"),
        digest=digest,
        prompts=prompts,
        temperatures=_temperatures(where, header.get("temperatures")),
        max_new_tokens=_budget(where, header.get("max_new_tokens")),
        loads=_loads(where, header.get("loads")),
        headline=_headline(where, header.get("headline")),
        available=len(prompts),
        source=source,
        without_grammar=_flag(where, header, "without_grammar"),
    )


def _parse(path: Path) -> Mapping[Any, Any]:
    text = read_text(path)
    try:
        header = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        fail(f"{path}{line}", f"invalid YAML: {problem}", "check indentation and quotes near that line")
    except ValueError as error:  # a date such as 2024-99-99, which YAML tries to understand
        fail(str(path), f"invalid YAML: {error}", "put quotes around the value")
    if not isinstance(header, Mapping):
        fail(str(path), "expected a mapping of keys to values", f"known keys: {', '.join(KEYS)}")
    return header


def _string(where: str, header: Mapping[Any, Any], key: str, default: str | None) -> str:
    value = header.get(key, default)
    if value is None:
        fail(where, f"needs a value for '{key}'", f"add a line: {key}: ...")
    if not isinstance(value, str) or not value.strip():
        fail(where, f"'{key}' must be a string, not {value!r}", f'write it in quotes: {key}: "..."')
    return value.strip()


def _flag(where: str, header: Mapping[Any, Any], key: str) -> bool:
    value = header.get(key)
    if value is not None and not isinstance(value, bool):
        fail(
            where, f"'{key}' must be true or false, not {value!r}", f"leave '{key}' out, or write {key}: true"
        )
    return bool(value)


def _temperatures(where: str, value: Any) -> tuple[float, ...]:
    if value is None:
        return TEMPERATURES
    hint = "for example temperatures: [0, 1]"
    if not isinstance(value, list) or not value:
        fail(where, f"'temperatures' must be a list of numbers, not {value!r}", hint)
    for number in value:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 0 <= number < math.inf:
            fail(where, f"'temperatures' holds {number!r}, which is no number from 0", hint)
    if len(set(value)) < len(value):
        fail(where, "'temperatures' names the same temperature twice", hint)
    return tuple(float(number) for number in value)


def _budget(where: str, value: Any) -> int:
    if value is None:
        return MAX_NEW_TOKENS
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        fail(where, f"'max_new_tokens' must be a whole number from 1, not {value!r}", "for example 128")
    return value


def _loads(where: str, value: Any) -> tuple[Load, ...]:
    if value is None:
        return LOADS
    hint = "for example loads: [c=1, c=8, poisson=0.7]"
    if not isinstance(value, list) or not value:
        fail(where, f"'loads' must be a list of labels, not {value!r}", hint)
    loads = []
    for label in value:
        if not isinstance(label, str):
            fail(where, f"'loads' holds {label!r}, which is no label", hint)
        try:
            loads.append(Load.parse(label))
        except WorkloadError as error:
            fail(where, error.message, error.hint)
    if len(set(loads)) < len(loads):
        fail(where, "'loads' names the same load twice", hint)
    return tuple(loads)


def _headline(where: str, value: Any) -> Headline:
    if value is None:
        return HEADLINE
    known = get_args(Headline)
    if value not in known:
        near = did_you_mean(str(value), known)
        fail(where, f"no headline {value!r}{near}", f"headlines are {', '.join(known)}")
    return cast(Headline, value)
