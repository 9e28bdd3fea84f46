"""What the gate keeps of a run, and the baseline file that holds it: counts per prompt, and the audits.

No times: absolute times depend on the machine and are never compared, so they are not kept. A run and a
baseline become the same `Snapshot`, and the gate compares two of them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, get_args

from specbench.audit.verdicts import Verdict
from specbench.errors import CheckFailed, NotMeasured, UsageError
from specbench.metrics import acceptance
from specbench.metrics.acceptance import RoundCounts
from specbench.records import SCHEMA_VERSION, CellKey, CellRecords, RoundRecord, read_document

if TYPE_CHECKING:
    from specbench.bench.store import RunStore

KIND = "specbench-baseline"
ABOUT = (
    "Counts and audit verdicts of one run, for `specbench gate`. "
    "No times are kept, because absolute times are not compared."
)
COLUMNS = tuple(field.name for field in fields(RoundCounts))
"""What is counted of each prompt: sums over the decode rounds of all its requests in the cell."""

FIGURES = {
    "tokens_per_target_step": acceptance.tokens_per_target_step,
    "acceptance_length": acceptance.acceptance_length,
    "draft_acceptance_rate": acceptance.draft_acceptance_rate,
    "alpha": acceptance.alpha,
}
"""Pooled figures, written beside the counts for readers; the gate derives them again."""


@dataclass(frozen=True, slots=True)
class Audited:
    """What one strategy's chi-squared check found; `reason` is the verdict's one sentence."""

    strategy: str
    verdict: Verdict
    reason: str
    p_value: float | None
    alpha: float
    dtype: str
    draws: int
    smallest_detectable_tv: float | None


@dataclass(frozen=True, slots=True)
class CellCounts:
    """The counts of one cell, by prompt: the sampling unit, since rounds within a request are correlated."""

    requests: int
    failures: int
    prompts: Mapping[str, RoundCounts]

    @property
    def pooled(self) -> RoundCounts:
        """Return the sums over all prompts."""
        return total(self.prompts.values())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is compared of a run. `status`, `created`, `config` and `environment` are those of run.json."""

    run_id: str
    created: str
    status: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    audits: tuple[Audited, ...]
    cells: Mapping[CellKey, CellCounts]


def total(counts: Sequence[RoundCounts] | Any) -> RoundCounts:
    """Add counts up."""
    rows = [tuple(getattr(entry, name) for name in COLUMNS) for entry in counts]
    return RoundCounts(*(sum(column) for column in zip(*rows, strict=True))) if rows else _NOTHING


_NOTHING = RoundCounts(*(0 for _ in COLUMNS))


def count_cell(cell: CellRecords) -> CellCounts:
    """Count the decode rounds of each prompt, over all its requests and repeats."""
    rounds: dict[str, list[RoundRecord]] = defaultdict(list)
    requests = failures = 0
    for serving in cell.servings:
        prompt_of = {request.request: request.prompt_id for request in serving.requests}
        requests += len(serving.requests)
        failures += sum(request.finish_reason == "error" for request in serving.requests)
        for prompt in prompt_of.values():
            rounds[prompt] += ()
        for row in serving.rounds:
            if row.round > 0 and row.request in prompt_of:
                rounds[prompt_of[row.request]].append(row)
    counted = {prompt: acceptance.count_rounds(rounds[prompt]) for prompt in sorted(rounds)}
    return CellCounts(requests, failures, counted)


def of_run(store: RunStore) -> Snapshot:
    """Take a snapshot of a stored run, finished or not.

    Raises:
        NotMeasured: the run claims cells, but its records are not there.
    """
    run = store.document
    cells = {cell.key: count_cell(cell) for cell in store.cells()}
    if run.cells and not cells:
        raise NotMeasured(
            f"{store.folder} has no records, only run.json, so its counts have no sampling error",
            hint="copy the parquet files of the run too",
        )
    audits = tuple(
        Audited(**{field.name: getattr(audit, field.name) for field in fields(Audited)})
        for audit in run.audits
    )
    return Snapshot(run.run_id, run.created, run.status, run.config, run.environment, audits, cells)


def require_sound(snapshot: Snapshot) -> None:
    """Refuse to make a baseline of a run that nobody should be held to.

    Raises:
        NotMeasured: it is incomplete, some requests failed, or a fault was injected.
        CheckFailed: its audit failed.
    """
    if snapshot.status != "complete":
        raise NotMeasured(
            f"run {snapshot.run_id} is {snapshot.status}; a baseline needs a complete run",
            hint="run the same command again to resume it",
        )
    if not snapshot.cells:
        raise NotMeasured(f"run {snapshot.run_id} holds no cell")
    if fault := snapshot.config.get("inject"):
        raise NotMeasured(f"run {snapshot.run_id} has the injected fault '{fault}'; it is no baseline")
    for key, cell in snapshot.cells.items():
        if cell.failures:
            raise NotMeasured(
                f"{cell.failures} of {cell.requests} requests failed in {key}; a baseline needs all of them"
            )
    if failed := [audit.strategy for audit in snapshot.audits if audit.verdict == "FAIL"]:
        raise CheckFailed(
            f"the audit failed {', '.join(failed)} in run {snapshot.run_id}; it is no baseline",
            hint="leave the strategy out, or mend it and run again",
        )


# The file


def to_json(snapshot: Snapshot) -> str:
    """Write a baseline file: the same snapshot always gives the same text."""
    cells = [
        {
            **asdict(key),
            "requests": cell.requests,
            "figures": {name: _rounded(formula(cell.pooled)) for name, formula in FIGURES.items()},
            "counts": asdict(cell.pooled),
            "prompts": {
                prompt: [getattr(counts, name) for name in COLUMNS] for prompt, counts in cell.prompts.items()
            },
        }
        for key, cell in snapshot.cells.items()
    ]
    document = {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "about": ABOUT,
        "run_id": snapshot.run_id,
        "created": snapshot.created,
        "config": _without_paths(snapshot.config),
        "environment": {key: part for key, part in snapshot.environment.items() if key != "command"},
        "audits": [asdict(audit) for audit in snapshot.audits],
        "prompt_columns": list(COLUMNS),
        "cells": cells,
    }
    return "".join(_lines(document)) + "\n"


def read(path: Path) -> Snapshot:
    """Read a baseline file.

    Raises:
        UsageError: it is missing, is no baseline, or was written by a newer specbench.
    """
    remedy = "make one with `specbench baseline RUN --output FILE`"
    document = read_document(path, "baseline", kind=KIND, remedy=remedy)
    try:
        return _parse(document)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        what = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
        raise UsageError(f"baseline {path} is damaged: {what}", hint=remedy) from None


def _parse(document: Mapping[str, Any]) -> Snapshot:
    columns = document["prompt_columns"]
    cells = {}
    for entry in document["cells"]:
        key = CellKey(
            str(entry["workload"]), float(entry["temperature"]), str(entry["load"]), str(entry["strategy"])
        )
        prompts = {
            prompt: _counts(dict(zip(columns, row, strict=True)), f"{key}, prompt {prompt}")
            for prompt, row in entry["prompts"].items()
        }
        cell = CellCounts(int(entry["requests"]), 0, prompts)
        if _counts(entry["counts"], str(key)) != cell.pooled:
            raise ValueError(f"the counts of {key} are not the sums over its prompts")
        cells[key] = cell
    audits = []
    for entry in document["audits"]:
        audit = Audited(**{field.name: entry[field.name] for field in fields(Audited)})
        if audit.verdict not in get_args(Verdict):
            raise ValueError(f"'{audit.verdict}' is no verdict")
        audits.append(audit)
    if not isinstance(document["config"], dict) or not isinstance(document["environment"], dict):
        raise ValueError("config and environment are objects")
    return Snapshot(
        str(document["run_id"]),
        str(document["created"]),
        "complete",
        document["config"],
        document["environment"],
        tuple(audits),
        cells,
    )


def _counts(values: Mapping[str, Any], where: str) -> RoundCounts:
    for name in COLUMNS:
        if type(values[name]) is not int or values[name] < 0:
            raise ValueError(f"{name} of {where} is {values[name]!r}; expected a count")
    return RoundCounts(**{name: values[name] for name in COLUMNS})


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Name models by their last path component: a baseline is shared, a home directory is not."""
    models = {
        role: {**model, "name": PurePath(str(model.get("name"))).name} if isinstance(model, dict) else model
        for role, model in (config.get("models") or {}).items()
    }
    return {**config, "models": models}


def _lines(value: Any, indent: int = 0) -> Iterator[str]:
    """Write JSON with one entry a line, and lists of plain values on one."""
    pad = " " * (indent + 1)
    if isinstance(value, Mapping) and value:
        yield "{"
        for place, (key, item) in enumerate(value.items()):
            yield f"{',' if place else ''}\n{pad}{json.dumps(key, ensure_ascii=False)}: "
            yield from _lines(item, indent + 1)
        yield f"\n{' ' * indent}}}"
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        yield "["
        for place, item in enumerate(value):
            yield f"{',' if place else ''}\n{pad}"
            yield from _lines(item, indent + 1)
        yield f"\n{' ' * indent}]"
    else:
        yield json.dumps(value, ensure_ascii=False, allow_nan=False)
