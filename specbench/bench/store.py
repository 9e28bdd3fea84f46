"""The run folder: what its files hold, and how they are written so that an interrupted run can resume.

While a run is under way every serving has three small files in `parts/`, each replaced in one piece and
`…requests.parquet` last, so a serving counts as written when that one exists. `finish` merges them into
`steps.parquet`, `rounds.parquet` and `requests.parquet`. The metadata of a requests file lists the
servings it holds, with what belongs to a serving rather than to a row (`duration_s`, the order of writing).
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import re
import shutil
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.audit.verdicts import AuditRecord, ChiSquaredVerdict
from specbench.errors import UsageError
from specbench.metrics.summary import CellSummary
from specbench.records import (
    SCHEMA_VERSION,
    CellKey,
    CellRecords,
    MemoryRecord,
    RequestRecord,
    RoundRecord,
    Serving,
    StepRecord,
    plain,
    read_document,
    sampling_from,
)

if TYPE_CHECKING:
    import pyarrow as pa

SECTIONS = ("cells", "audits", "evidence", "busy", "notes", "status", "memory")
"""The parts of run.json that change while a run is under way."""


@dataclass(frozen=True, slots=True)
class Run:
    """What run.json says, in types: everything a report or a gate needs."""

    run_id: str
    schema_version: int
    status: str
    created: str
    config: dict[str, Any]
    environment: dict[str, Any]
    busy: dict[str, Any] | None
    notes: list[str] = field(default_factory=list)
    cells: list[CellSummary] = field(default_factory=list)
    audits: list[ChiSquaredVerdict] = field(default_factory=list)
    memory: dict[str, MemoryRecord] = field(default_factory=dict)
    evidence: list[AuditRecord] = field(default_factory=list)


class RunStore:
    """One run folder, open for reading and writing by one process."""

    def __init__(self, folder: Path, document: dict[str, Any]) -> None:
        self.folder = folder
        self._document = document
        self._known: dict[_ServingKey, _Entry] | None = None

    @classmethod
    def create(cls, folder: Path, config: Mapping[str, Any], environment: Mapping[str, Any]) -> RunStore:
        """Make the folder and its run.json; a folder that holds a run of the same configuration is resumed.

        Raises:
            UsageError: the folder cannot be written, or holds something else.
        """
        folder = Path(folder)
        config, environment = _json_ready(config), _json_ready(environment)
        if os.path.lexists(folder / "run.json"):
            store = cls.open(folder)
            if store._document.get("config") != config:
                raise UsageError(
                    f"{folder} already holds a run with another configuration{_differences(store, config)}",
                    hint="choose another run id, or repeat the command it was made with to resume it",
                )
            store.update(status="running")
            return store
        if any(folder.glob("*.parquet")) or any(folder.glob("parts/*.parquet")):
            raise UsageError(
                f"{folder} holds measurements but no run.json, so it cannot be resumed",
                hint="choose another run id, or move that folder away",
            )
        document = {
            "schema_version": SCHEMA_VERSION,
            "run_id": folder.name,
            "status": "running",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "config": config,
            "environment": environment,
            "busy": None,
            "notes": [],
            "memory": {},
            "cells": [],
            "audits": [],
        }
        store = cls(folder, document)
        try:
            store._parts.mkdir(parents=True, exist_ok=True)
            store._save(document)
        except OSError as problem:
            raise UsageError(
                f"cannot write a run to {folder}: {problem.strerror or problem}",
                hint="choose a folder that can be written",
            ) from None
        return store

    @classmethod
    def open(cls, folder: Path) -> RunStore:
        """Open an existing run.

        Raises:
            UsageError: no run there, one that cannot be read, or one written by a newer specbench.
        """
        folder = Path(folder)
        remedy = "name a folder that `specbench run` made, or `latest`"
        if not (folder / "run.json").exists():
            raise UsageError(f"no run in {folder}: it holds no run.json", hint=remedy)
        document = read_document(folder / "run.json", "run", remedy=remedy)
        return cls(folder, document)

    @property
    def document(self) -> Run:
        """Return run.json as typed records; keys this version does not know are ignored."""
        try:
            built = rebuild(Run, {"run_id": self.folder.name, **self._document}, "run.json")
        except (TypeError, ValueError, AttributeError) as problem:
            raise UsageError(f"{self.folder / 'run.json'}: {problem}") from None
        assert isinstance(built, Run)
        return built

    def write_serving(self, serving: Serving) -> None:
        """Write one serving; a crash at any point leaves it either whole or absent."""
        entry = _Entry(len(self._index()), serving.duration_s)
        key = _ServingKey(serving.cell, serving.repeat, serving.unit)
        self._write_tables(self._parts, _slug(key) + ".", [(key, entry, serving)])
        self._index()[key] = entry

    def has(self, cell: CellKey, repeat: int, unit: int) -> bool:
        """Return whether this serving has been written."""
        return _ServingKey(cell, repeat, unit) in self._index()

    def cells(self) -> list[CellRecords]:
        """Read all records, cells in the order of the configuration, else as first written."""
        run = self.document
        slices: dict[CellKey, list[Serving]] = {}
        for _, serving in sorted(self._servings(), key=lambda pair: pair[0].order):
            slices.setdefault(serving.cell, []).append(serving)
        return [
            CellRecords(
                key,
                tuple(sorted(slices[key], key=lambda s: (s.repeat, s.unit))),
                run.memory.get(str(key), MemoryRecord()),
            )
            for key in sorted(slices, key=_configured_order(run.config))
        ]

    def update(self, **sections: Any) -> None:
        """Rewrite sections of run.json in one piece; `memory` adds to the cells it already knows."""
        unknown = sections.keys() - set(SECTIONS)
        if unknown:
            raise TypeError(f"run.json has no section {sorted(unknown)}; expected {SECTIONS}")
        if "memory" in sections:
            sections["memory"] = {**self._document.get("memory", {}), **sections["memory"]}
        document = {**self._document, **{name: _json_ready(value) for name, value in sections.items()}}
        self._save(document)
        self._document = document

    def finish(self) -> None:
        """Merge all parts into the three parquet files and mark the run complete."""
        found = sorted(self._servings(), key=lambda pair: pair[0].order)
        merged = [(_ServingKey(s.cell, s.repeat, s.unit), entry, s) for entry, s in found]
        self._write_tables(self.folder, "", merged)
        shutil.rmtree(self._parts, ignore_errors=True)
        self.update(status="complete")

    @property
    def _parts(self) -> Path:
        return self.folder / "parts"

    def _save(self, document: Mapping[str, Any]) -> None:
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
        replace_file(self.folder / "run.json", (text + "\n").encode())

    def _index(self) -> dict[_ServingKey, _Entry]:
        """Return every serving written, with its order and duration."""
        if self._known is None:
            self._known = {}
            for path in self._requests_files():
                self._known.update(_read_index(path))
        return self._known

    def _requests_files(self) -> list[Path]:
        # A part is read after the merged file: where both hold a serving, the part is as new or newer.
        merged = self.folder / "requests.parquet"
        return [path for path in (merged,) if path.exists()] + sorted(self._parts.glob("*.requests.parquet"))

    def _servings(self) -> list[tuple[_Entry, Serving]]:
        found: dict[_ServingKey, tuple[_Entry, Serving]] = {}
        for path in self._requests_files():
            stem = path.name.removesuffix("requests.parquet")
            rows = {kind: _read_rows(path.with_name(f"{stem}{kind}.parquet"), kind) for kind in COLUMNS}
            # Only what the index lists counts: rows of a merge that was cut short may lie beside it.
            for key, entry in _read_index(path).items():
                steps, rounds, requests = (tuple(rows[kind].get(key, ())) for kind in COLUMNS)
                serving = Serving(key.cell, key.repeat, key.unit, steps, rounds, requests, entry.duration_s)
                found[key] = (entry, serving)
        return list(found.values())

    def _write_tables(
        self, folder: Path, prefix: str, servings: Sequence[tuple[_ServingKey, _Entry, Serving]]
    ) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder.mkdir(parents=True, exist_ok=True)
        index = json.dumps([_index_item(key, entry) for key, entry, _ in servings])
        for kind, columns in COLUMNS.items():  # requests last: its file makes the servings count
            metadata = {"specbench.schema_version": str(SCHEMA_VERSION)}
            if kind == "requests":
                metadata[INDEX] = index
            schema = _schema(kind).with_metadata(metadata)
            rows = [row for key, _, serving in servings for row in _rows(kind, key, serving)]
            names = [column.name for column in KEY_COLUMNS + columns]
            arrays = [
                pa.array([row[place] for row in rows], type=schema.field(name).type)
                for place, name in enumerate(names)
            ]
            sink = io.BytesIO()
            pq.write_table(pa.Table.from_arrays(arrays, schema=schema), sink, compression="zstd")
            replace_file(folder / f"{prefix}{kind}.parquet", sink.getvalue())


# ---- The three tables -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """One stored column: its Arrow type, unit and meaning."""

    name: str
    type: str
    unit: str = ""
    meaning: str = ""
    nullable: bool = False


KEY_COLUMNS = (
    Column("workload", "string"),
    Column("temperature", "float64"),
    Column("load", "string"),
    Column("strategy", "string"),
    Column("repeat", "int32", meaning="which repetition of the whole matrix"),
    Column("unit", "int32", meaning="which slice of the repeat"),
)
"""What every row carries beside its record: the serving it belongs to."""

COLUMNS: dict[str, tuple[Column, ...]] = {
    "steps": (
        Column("step", "int32", meaning="number of the target forward within its serving"),
        Column("batch", "int32", "requests"),
        Column("tokens_in", "int32", "tokens", "tokens sent to the target"),
        Column("tokens_padded", "int32", "tokens", "padding among them"),
        Column("context_max", "int32", "tokens", "longest context in the batch"),
        Column("phase", "string"),
        Column("started", "float64", "s", "since the start of the schedule"),
        Column("wall_s", "float64", "s"),
        Column("draft_s", "float64", "s", nullable=True),
        Column("verify_s", "float64", "s", nullable=True),
        Column("commit_s", "float64", "s", nullable=True),
        Column("host_s", "float64", "s", "wall time outside draft, verify and commit", nullable=True),
        Column("forward_s", "float64", "s", "wall time inside model forwards", nullable=True),
        Column("dispatch", "string"),
        Column("kv_committed", "int64", "slots", "held by committed tokens"),
        Column("kv_lookahead", "int64", "slots", "reserved for the proposal"),
        Column("kv_draft", "int64", "slots", "held by the draft"),
    ),
    "rounds": (
        Column("step", "int32"),
        Column("request", "int32"),
        Column("round", "int32", meaning="0 is the prefill"),
        Column("drafted", "int32", "tokens", "draft tokens or tree nodes offered"),
        Column("draft_depth", "int32", "tokens", "longest root-to-leaf path offered"),
        Column("accepted", "int32", "tokens", "kept by verification, before any truncation"),
        Column("rejected", "bool", meaning="verification stopped at a rejection"),
        Column("emitted", "int32", "tokens", "reached the output, after truncation"),
        Column("ended_by", "string"),
        Column("draft_tokens", "list<int32>", meaning="draft ids, on request", nullable=True),
        Column("draft_probs", "list<float64>", meaning="q of each draft id, on request", nullable=True),
        Column(
            "draft_parents", "list<int32>", meaning="parent of each node, -1 at the top; trees", nullable=True
        ),
    ),
    "requests": (
        Column("request", "int32"),
        Column("prompt_id", "string"),
        Column("prompt_tokens", "list<int32>", "token ids"),
        Column("output_tokens", "list<int32>", "token ids"),
        Column("sampling", "string", meaning="SamplingParams as JSON"),
        Column("arrival", "float64", "s", "since the start of the schedule"),
        Column("first_scheduled", "float64", "s", "since the start of the schedule", nullable=True),
        Column("chunk_times", "list<float64>", "s", "when each chunk that holds tokens arrived"),
        Column("chunk_sizes", "list<int32>", "tokens", "tokens of each chunk"),
        Column("finished", "float64", "s", "since the start of the schedule"),
        Column("finish_reason", "string"),
        Column("error", "string", nullable=True),
    ),
}
"""One column per field of StepRecord, RoundRecord and RequestRecord, in their order."""

RECORDS: dict[str, type[Any]] = {"steps": StepRecord, "rounds": RoundRecord, "requests": RequestRecord}
INDEX = "specbench.servings"


@dataclass(frozen=True, slots=True)
class _ServingKey:
    cell: CellKey
    repeat: int
    unit: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """What belongs to a serving as a whole: how many were written before it, and how long it took."""

    order: int
    duration_s: float


def _schema(kind: str) -> pa.Schema:
    import pyarrow as pa

    plain_types = {
        "string": pa.string(),
        "bool": pa.bool_(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "float64": pa.float64(),
    }
    lists = {f"list<{name}>": pa.list_(plain_types[name]) for name in ("int32", "float64")}
    known = plain_types | lists
    return pa.schema(
        [
            pa.field(
                column.name,
                known[column.type],
                nullable=column.nullable,
                metadata={
                    name: text for name, text in (("unit", column.unit), ("meaning", column.meaning)) if text
                },
            )
            for column in KEY_COLUMNS + COLUMNS[kind]
        ]
    )


def _rows(kind: str, key: _ServingKey, serving: Serving) -> Iterator[tuple[Any, ...]]:
    cell = key.cell
    prefix = (cell.workload, cell.temperature, cell.load, cell.strategy, key.repeat, key.unit)
    names = [column.name for column in COLUMNS[kind]]
    for record in getattr(serving, kind):
        values = [getattr(record, name) for name in names]
        if kind == "requests":
            values[names.index("sampling")] = json.dumps(plain(record.sampling))
        yield (*prefix, *values)


def _read_rows(path: Path, kind: str) -> dict[_ServingKey, list[Any]]:
    """Return the records of a table by serving, in stored order."""
    import pyarrow.parquet as pq

    table = _readable(path, lambda: pq.read_table(path))
    columns = COLUMNS[kind]
    stored = [_values(table, column) for column in columns]
    if kind == "requests":
        # Few sampling settings, many requests: rebuild each once.
        place = [column.name for column in columns].index("sampling")
        rebuilt = {text: sampling_from(json.loads(text)) for text in set(stored[place])}
        stored[place] = [rebuilt[text] for text in stored[place]]
    keys = zip(*(table.column(column.name).to_pylist() for column in KEY_COLUMNS), strict=True)
    records = map(RECORDS[kind], *stored)
    found: dict[_ServingKey, list[Any]] = {}
    for values, group in itertools.groupby(zip(keys, records, strict=True), key=lambda pair: pair[0]):
        key = _ServingKey(CellKey(*values[:4]), *values[4:])
        found.setdefault(key, []).extend(record for _, record in group)
    return found


def _values(table: pa.Table, column: Column) -> list[Any]:
    if column.name not in table.column_names:  # written before this column existed
        return [None] * table.num_rows
    values: list[Any] = table.column(column.name).to_pylist()
    if column.type.startswith("list"):
        return [None if value is None else tuple(value) for value in values]
    return values


def _read_index(path: Path) -> dict[_ServingKey, _Entry]:
    import pyarrow.parquet as pq

    metadata = _readable(path, lambda: pq.read_schema(path)).metadata or {}
    return {
        _ServingKey(CellKey(*item["cell"]), item["repeat"], item["unit"]): _Entry(
            item["order"], item["duration_s"]
        )
        for item in json.loads(metadata.get(INDEX.encode(), b"[]"))
    }


def _index_item(key: _ServingKey, entry: _Entry) -> dict[str, Any]:
    return {
        "cell": list(dataclasses.astuple(key.cell)),
        "repeat": key.repeat,
        "unit": key.unit,
        "order": entry.order,
        "duration_s": entry.duration_s,
    }


def _readable(path: Path, read: Any) -> Any:
    import pyarrow as pa

    try:
        return read()
    except (OSError, pa.ArrowException) as problem:
        reason = str(problem).splitlines()[0]
        raise UsageError(
            f"{path} cannot be read: {reason}", hint="remove that file to measure its part again"
        ) from None


def _slug(key: _ServingKey) -> str:
    """Return a file name for a serving: readable, and unique through a digest of the exact key."""
    cell = key.cell
    text = f"{cell.workload}-T{cell.temperature:g}-{cell.load}-{cell.strategy}"
    exact = json.dumps(dataclasses.astuple(key)).encode()
    digest = hashlib.sha256(exact).hexdigest()[:10]
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '_', text)[:80]}-r{key.repeat}-u{key.unit}-{digest}"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or the next start after a crash, sees all of it or what was before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _configured_order(config: Mapping[str, Any]) -> Any:
    """Return a sort key that places cells as the configuration lists them, the rest as they come."""
    workloads = config.get("workloads") or {}
    loads = {
        name: list(entry.get("loads") or ()) for name, entry in workloads.items() if isinstance(entry, dict)
    }
    strategies = [str(spec) for spec in config.get("strategies") or ()]
    temperatures = list(config.get("temperatures") or ())

    def place(value: Any, listing: Iterable[Any]) -> int:
        known = list(listing)
        return known.index(value) if value in known else len(known)

    return lambda key: (
        place(key.workload, workloads),
        place(key.load, loads.get(key.workload, ())),
        place(key.temperature, temperatures),
        place(key.strategy, strategies),
    )


# ---- run.json to types and back ---------------------------------------------------------------------


def _json_ready(value: Any) -> Any:
    """Return a value as JSON stores it: records as objects, and no number where there is none to tell."""
    value = plain(value)
    if type(value).__module__ == "numpy":  # a scalar or an array that arithmetic left behind
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _differences(store: RunStore, config: Mapping[str, Any]) -> str:
    """Name the settings in which two configurations differ."""
    mine = store._document.get("config") or {}
    names = [name for name in {**mine, **config} if mine.get(name) != config.get(name)]
    return f" (it differs in {', '.join(names)})" if names else ""


def rebuild(hint: Any, value: Any, where: str) -> Any:
    """Turn parsed JSON into the type it was written from.

    Raises:
        ValueError: a value that is required is missing, named by its place in the document.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return rebuild(next(a for a in arguments if a is not type(None)), value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _rebuild_record(hint, value, where)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(rebuild(arguments[0], item, where) for item in value)
        return tuple(rebuild(kind, item, where) for kind, item in zip(arguments, value, strict=True))
    if origin is list:
        return [rebuild(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        return {key: rebuild(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is float and isinstance(value, int):
        return float(value)
    return value


def _rebuild_record(cls: type[Any], value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {value!r:.40}; expected an object")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        place = f"{where}.{item.name}"
        if item.name in value:
            values[item.name] = rebuild(hints[item.name], value[item.name], place)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            if type(None) not in typing.get_args(hints[item.name]):
                raise ValueError(f"{place} is missing")
            values[item.name] = None
    return cls(**values)
