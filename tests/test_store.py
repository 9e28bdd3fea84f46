"""The run folder: exact round trips, whole writes, resuming."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specbench.audit.verdicts import ChiSquaredVerdict
from specbench.bench import store as store_module
from specbench.bench.store import COLUMNS, RECORDS, RunStore
from specbench.errors import UsageError
from specbench.metrics.summary import CellSummary, Estimate
from specbench.records import (
    SCHEMA_VERSION,
    CellKey,
    MemoryRecord,
    RequestRecord,
    RoundRecord,
    SamplingParams,
    Serving,
    StepRecord,
)

CONFIG: dict[str, Any] = {
    "workloads": {"chat": {"loads": ["c=1"]}, "code": {"loads": ["c=1"]}},
    "temperatures": [0.0, 1.0],
    "strategies": ["ordinary", "ngram:k=4"],
    "repeats": 2,
}
KEY = CellKey("chat", 0.0, "c=1", "ngram:k=4")

seconds = st.floats(0, 1e6, allow_nan=False)
small = st.integers(0, 2**31 - 1)
ids = st.lists(small, max_size=5).map(tuple)

keys = st.builds(
    CellKey,
    workload=st.text(min_size=1, max_size=12),
    temperature=st.floats(0, 2),
    load=st.sampled_from(["c=1", "poisson=0.7"]),
    strategy=st.sampled_from(["ordinary", "ordinary#2", "ngram:k=4,max=3", "early-exit:layers=8"]),
)
steps = st.builds(
    StepRecord,
    step=small,
    batch=small,
    tokens_in=small,
    tokens_padded=small,
    context_max=small,
    phase=st.sampled_from(["prefill", "decode", "mixed"]),
    started=seconds,
    wall_s=seconds,
    draft_s=st.none() | seconds,
    verify_s=st.none() | seconds,
    commit_s=st.none() | seconds,
    host_s=st.none() | seconds,
    forward_s=st.none() | seconds,
    dispatch=st.sampled_from(["eager", "compiled", "graph", "capture"]),
    kv_committed=st.integers(0, 2**40),
    kv_lookahead=small,
    kv_draft=small,
)
rounds = st.builds(
    RoundRecord,
    step=small,
    request=small,
    round=small,
    drafted=small,
    draft_depth=small,
    accepted=small,
    rejected=st.booleans(),
    emitted=small,
    ended_by=st.sampled_from(["none", "eos", "stop", "budget"]),
    draft_tokens=st.none() | ids,
    draft_probs=st.none() | st.lists(st.floats(0, 1), max_size=5).map(tuple),
)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**63),
    max_new_tokens=st.integers(0, 4096),
    stop_token_ids=ids,
    ignore_eos=st.booleans(),
    order=st.permutations(["temperature", "top_k", "top_p", "min_p"]).map(tuple),
)
requests = st.builds(
    RequestRecord,
    request=small,
    prompt_id=st.text(max_size=8),
    prompt_tokens=ids,
    output_tokens=ids,
    sampling=samplings,
    arrival=seconds,
    first_scheduled=st.none() | seconds,
    chunk_times=st.lists(seconds, max_size=4).map(tuple),
    chunk_sizes=ids,
    finished=seconds,
    finish_reason=st.sampled_from(["eos", "stop", "length", "context", "error", "cancelled"]),
    error=st.none() | st.text(max_size=20),
)
servings = st.builds(
    Serving,
    cell=keys,
    repeat=st.integers(0, 9),
    unit=st.integers(0, 9),
    steps=st.lists(steps, max_size=3).map(tuple),
    rounds=st.lists(rounds, max_size=3).map(tuple),
    requests=st.lists(requests, max_size=3).map(tuple),
    duration_s=seconds,
)


def serving(key: CellKey = KEY, repeat: int = 0, unit: int = 0, duration_s: float = 1.5) -> Serving:
    """Make a serving of one request that took a prefill and one decode step."""
    step = StepRecord(0, 1, 4, 0, 4, "prefill", 0.0, 0.01, None, 0.008, 0.001, 0.001, 0.007, "eager", 4, 0, 0)
    later = dataclasses.replace(
        step, step=1, tokens_in=5, context_max=8, phase="decode", draft_s=0.001, kv_lookahead=4
    )
    prefill = RoundRecord(0, 0, 0, 0, 0, 0, False, 1, "none")
    decode = RoundRecord(1, 0, 1, 4, 4, 2, True, 3, "budget", (5, 6, 7, 8), (0.5, 0.25, 0.125, 0.1))
    request = RequestRecord(
        0,
        "p0",
        (1, 2, 3, 4),
        (5, 5, 6, 9),
        SamplingParams(temperature=key.temperature, seed=7),
        0.0,
        0.001,
        (0.01, 0.02),
        (1, 3),
        0.02,
        "length",
    )
    return Serving(key, repeat, unit, (step, later), (prefill, decode), (request,), duration_s)


def new_store(folder: Path) -> RunStore:
    return RunStore.create(folder / "run", CONFIG, {"hardware": {"cores": 2}})


def test_columns_are_the_fields_of_the_records() -> None:
    """Each table has one column per field of its record, in order, so nothing can be forgotten.

    Log-probabilities are for callers of the engine: no run asks for them.
    """
    for kind, record in RECORDS.items():
        fields = [f.name for f in dataclasses.fields(record) if f.name != "logprobs"]
        assert [c.name for c in COLUMNS[kind]] == fields


@given(
    written=st.lists(servings, max_size=4, unique_by=lambda s: (s.cell, s.repeat, s.unit)),
    merge_after=st.integers(0, 4),
)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_round_trip_is_exact(written: list[Serving], merge_after: int) -> None:
    """What is read back equals what was written, from parts, merged files, or a mixture of both."""
    with tempfile.TemporaryDirectory() as folder:
        store = RunStore.create(Path(folder) / "run", {}, {})
        for number, one in enumerate(written):
            if number == merge_after:
                store.finish()
            store.write_serving(one)
        by_key = {(s.cell, s.repeat, s.unit): s for s in written}
        for reader in (store, RunStore.open(store.folder)):
            read = [s for cell in reader.cells() for s in cell.servings]
            assert {(s.cell, s.repeat, s.unit): s for s in read} == by_key
        store.finish()
        again = RunStore.open(store.folder)
        assert {(s.cell, s.repeat, s.unit): s for c in again.cells() for s in c.servings} == by_key
        assert all(again.has(s.cell, s.repeat, s.unit) for s in written)


def test_finished_run_is_three_tables_with_keys_and_units(tmp_path: Path) -> None:
    """A finished run holds no parts; every row names its cell, and columns carry their unit."""
    store = new_store(tmp_path)
    for repeat in range(2):
        store.write_serving(serving(repeat=repeat))
    store.finish()
    assert {path.name for path in store.folder.iterdir()} == {
        "run.json",
        "steps.parquet",
        "rounds.parquet",
        "requests.parquet",
    }
    table = pq.read_table(store.folder / "steps.parquet")
    assert table.column_names[:6] == ["workload", "temperature", "load", "strategy", "repeat", "unit"]
    assert table.column("strategy").to_pylist() == ["ngram:k=4"] * 4
    assert table.schema.field("wall_s").metadata == {b"unit": b"s"}
    requests_table = pq.read_table(store.folder / "requests.parquet")
    assert str(requests_table.schema.field("output_tokens").type.value_type) == "int32"
    assert json.loads(requests_table.column("sampling")[0].as_py())["seed"] == 7
    assert store.document.status == "complete"


def test_cells_come_in_configured_order_with_their_memory(tmp_path: Path) -> None:
    """Cells are ordered as configured, unconfigured ones last; servings by repeat and unit."""
    store = new_store(tmp_path)
    again, ordinary = (dataclasses.replace(KEY, strategy=name) for name in ("ordinary#2", "ordinary"))
    for key in (again, KEY, ordinary):
        for repeat, unit in ((1, 0), (0, 1), (0, 0)):
            store.write_serving(serving(key, repeat, unit))
    store.update(memory={str(KEY): MemoryRecord(draft_weights=0, peak_bytes=10)})
    cells = store.cells()
    assert [cell.key for cell in cells] == [ordinary, KEY, again]
    assert [(s.repeat, s.unit) for s in cells[0].servings] == [(0, 0), (0, 1), (1, 0)]
    assert cells[1].memory == MemoryRecord(draft_weights=0, peak_bytes=10)
    assert cells[0].memory == MemoryRecord()


def test_a_killed_run_resumes(tmp_path: Path) -> None:
    """After a restart the store knows which servings are there, and a second `create` continues the run."""
    new_store(tmp_path).write_serving(serving(unit=3))
    store = new_store(tmp_path)
    assert store.has(KEY, 0, 3)
    assert not store.has(KEY, 0, 4)
    assert not store.has(dataclasses.replace(KEY, temperature=1.0), 0, 3)
    store.write_serving(serving(unit=4))
    store.finish()
    assert [s.unit for s in RunStore.open(store.folder).cells()[0].servings] == [3, 4]


def failing_replace(at: int) -> Callable[..., None]:
    """Return an os.replace that stops the process at its `at`-th call, as a kill would."""
    real, calls = os.replace, iter(range(1, 1000))

    def replace(source: Any, target: Any, **options: Any) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt
        real(source, target, **options)

    return replace


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_serving_cut_short_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A crash between the three files of a serving leaves the serving absent and the others whole."""
    store = new_store(tmp_path)
    store.write_serving(serving(unit=0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing_replace(at))
        with pytest.raises(KeyboardInterrupt):
            store.write_serving(serving(unit=1))
    for reader in (store, RunStore.open(store.folder)):
        assert not reader.has(KEY, 0, 1)
        assert [s.unit for cell in reader.cells() for s in cell.servings] == [0]
    assert not list(store.folder.rglob("*.tmp"))
    store.write_serving(serving(unit=1))
    assert store.cells()[0].servings == (serving(unit=0), serving(unit=1))


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("merged_before", [False, True])
def test_a_merge_cut_short_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, merged_before: bool
) -> None:
    """A crash anywhere in `finish` leaves every serving readable once, and `finish` can be repeated."""
    store = new_store(tmp_path)
    store.write_serving(serving(unit=0))
    if merged_before:
        store.finish()
    store.write_serving(serving(unit=1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing_replace(at))
        with pytest.raises(KeyboardInterrupt):
            store.finish()
    expected = (serving(unit=0), serving(unit=1))
    reader = RunStore.open(store.folder)
    assert reader.cells()[0].servings == expected
    reader.finish()
    assert RunStore.open(store.folder).cells()[0].servings == expected


def test_an_update_cut_short_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash while run.json is rewritten leaves the previous one, in the file and in memory."""
    store = new_store(tmp_path)
    store.update(notes=["first"])
    monkeypatch.setattr(os, "replace", failing_replace(1))
    with pytest.raises(KeyboardInterrupt):
        store.update(notes=["second"])
    assert store.document.notes == ["first"]
    assert RunStore.open(store.folder).document.notes == ["first"]


def summary() -> CellSummary:
    """Make a summary in which whatever may be None is None."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(CellSummary):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            optional = "None" in str(field.type)
            values[field.name] = None if optional else () if "tuple" in str(field.type) else 1
    values |= {
        "key": KEY,
        "is_baseline": False,
        "decode_speedup": Estimate(1.25, None, None, 1),
        "joint_acceptance": (0.5, 0.25),
        "conditional_acceptance": ((0.5, 8), (0.5, 4)),
        "dispatch": {"eager": 3},
    }
    return CellSummary(**values)


def verdict() -> ChiSquaredVerdict:
    return ChiSquaredVerdict(
        strategy="ngram:k=4",
        verdict="INCONCLUSIVE",
        reason="too few draws",
        lossless_claimed=True,
        dtype="float32",
        temperature=1.0,
        top_k=3,
        prompts=1,
        draws=10,
        horizon=7,
        statistic=None,
        df=None,
        p_value=None,
        alpha=1e-4,
        tv_observed=None,
        tv_upper=None,
        smallest_detectable_tv=None,
        out_of_support=0,
        drafted=8,
        accepted=1,
        rejections=2,
        fully_accepted=0,
        seconds=0.1,
    )


def test_the_document_is_typed_and_survives(tmp_path: Path) -> None:
    """Summaries, verdicts and memory come back as the records they were, tuples included."""
    store = new_store(tmp_path)
    store.update(
        cells=[summary()],
        audits=[verdict()],
        busy={"busy": False, "reasons": []},
        notes=["warm-up discarded"],
        memory={str(KEY): MemoryRecord(target_weights=5)},
    )
    run = RunStore.open(store.folder).document
    assert run == store.document
    assert run.cells == [summary()]
    assert run.audits == [verdict()]
    assert run.memory == {str(KEY): MemoryRecord(target_weights=5)}
    assert (run.run_id, run.status, run.schema_version) == ("run", "running", SCHEMA_VERSION)
    assert run.config == CONFIG


def test_unknown_keys_are_ignored_and_missing_ones_are_not_measured(tmp_path: Path) -> None:
    """A document of another version of the same schema reads: extra keys go, absent figures are None."""
    store = new_store(tmp_path)
    store.update(cells=[summary()])
    path = store.folder / "run.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["cells"][0]["figure_of_tomorrow"] = 1.0
    document["section_of_tomorrow"] = {}
    for name in ("decode_speedup", "dispatch", "ttft"):
        del document["cells"][0][name]
    path.write_text(json.dumps(document), encoding="utf-8")
    cell = RunStore.open(store.folder).document.cells[0]
    assert cell == dataclasses.replace(summary(), decode_speedup=None, dispatch={})


def test_a_document_that_lacks_a_count_is_refused(tmp_path: Path) -> None:
    """A required count that is missing is an error that names its place, not a zero."""
    store = new_store(tmp_path)
    store.update(cells=[summary()])
    path = store.folder / "run.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["cells"][0]["requests"]
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(UsageError, match=r"cells\[0\].requests is missing"):
        _ = RunStore.open(store.folder).document


def test_figures_that_are_no_numbers_are_stored_as_absent(tmp_path: Path) -> None:
    """NaN and infinity become null, so that run.json is JSON; numpy scalars become plain numbers."""
    import numpy as np

    store = new_store(tmp_path)
    store.update(busy={"busy": True, "load": float("nan"), "cores": np.int64(2), "shares": np.ones(2)})
    assert RunStore.open(store.folder).document.busy == {
        "busy": True,
        "load": None,
        "cores": 2,
        "shares": [1.0, 1.0],
    }


def test_memory_of_earlier_cells_is_kept(tmp_path: Path) -> None:
    """A resumed run adds the memory of its cells to that of the cells measured before."""
    store = new_store(tmp_path)
    store.update(memory={"a": MemoryRecord(peak_bytes=1)})
    store.update(memory={"b": MemoryRecord(peak_bytes=2)})
    assert set(store.document.memory) == {"a", "b"}


def test_an_unknown_section_is_a_mistake(tmp_path: Path) -> None:
    """Misspelling a section is an error rather than a section nobody reads."""
    with pytest.raises(TypeError, match="cell"):
        new_store(tmp_path).update(cell=[])


def assert_one_line(caught: pytest.ExceptionInfo[UsageError], *words: str) -> None:
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 2
    for word in words:
        assert word in caught.value.message


def test_a_folder_that_cannot_be_a_run_is_refused(tmp_path: Path) -> None:
    """A path through a file, and a file itself, give one line that names the path."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError) as caught:
            RunStore.create(folder, {}, {})
        assert_one_line(caught, str(folder))


def test_an_unwritable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lack of permission gives one line and leaves nothing half made behind."""

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store_module, "replace_file", refuse)
    with pytest.raises(UsageError) as caught:
        new_store(tmp_path)
    assert_one_line(caught, "Permission denied")


def test_another_run_is_not_overwritten(tmp_path: Path) -> None:
    """A folder with another configuration is refused, and the difference is named."""
    new_store(tmp_path)
    with pytest.raises(UsageError) as caught:
        RunStore.create(tmp_path / "run", {**CONFIG, "repeats": 5}, {})
    assert_one_line(caught, "repeats")


def test_measurements_without_a_document_are_not_adopted(tmp_path: Path) -> None:
    """A folder whose run.json is gone is refused rather than resumed under another configuration."""
    store = new_store(tmp_path)
    store.write_serving(serving())
    (store.folder / "run.json").unlink()
    with pytest.raises(UsageError) as caught:
        new_store(tmp_path)
    assert_one_line(caught, "no run.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "run.json"),
        ("{", "not readable JSON"),
        ("[]", "is no run of specbench"),
        ('{"schema_version": 1, "kind": "specbench-baseline"}', "is no run of specbench"),
        ('{"schema_version": 99}', "schema version 99"),
        ('{"schema_version": 1, "cells": 3}', "run.json"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    """Missing, broken, foreign and newer documents each give one line."""
    if text is not None:
        (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        _ = RunStore.open(tmp_path).document
    assert_one_line(caught, words)


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    """A parquet file that cannot be read gives one line with its name."""
    store = new_store(tmp_path)
    store.write_serving(serving())
    damaged = next((store.folder / "parts").glob("*.steps.parquet"))
    damaged.write_bytes(b"PAR1")
    with pytest.raises(UsageError) as caught:
        RunStore.open(store.folder).cells()
    assert_one_line(caught, damaged.name)


def test_parts_of_similar_cells_do_not_collide(tmp_path: Path) -> None:
    """Names that differ only in characters a file name cannot hold get different files."""
    store = new_store(tmp_path)
    keys = [dataclasses.replace(KEY, strategy=name) for name in ("a:b=1", "a,b=1", "a/b=1")]
    for key in keys:
        store.write_serving(serving(key))
    assert {cell.key for cell in RunStore.open(store.folder).cells()} == set(keys)


def test_tables_stay_small(tmp_path: Path) -> None:
    """Ten thousand rounds take less than 40 bytes each."""
    store = new_store(tmp_path)
    one = serving()
    many = tuple(dataclasses.replace(one.rounds[1], round=i, accepted=i % 5) for i in range(10_000))
    store.write_serving(dataclasses.replace(one, rounds=many))
    store.finish()
    assert (store.folder / "rounds.parquet").stat().st_size < 400_000
