"""`specbench doctor`: every finding, the bounds against values worked out by hand, and how it is told."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from conftest import WORDS, save

from specbench import doctor
from specbench.cli import main
from specbench.doctor import bounds, examination, installed, machine, measure, pair, render
from specbench.doctor.bounds import step_bound
from specbench.doctor.findings import Finding, worst
from specbench.doctor.measure import Effort, Measured, Rate
from specbench.environment import BusyReport, Counters, LoadMonitor
from specbench.errors import UsageError
from specbench.models.resolve import resolve

SMALL = Effort(buffer_bytes=1 << 20, largest_side=32, seconds=0.005)

Captured = pytest.CaptureFixture[str]


def monitor(other: float) -> LoadMonitor:
    """Return a monitor of a machine whose other processes use so many cores; a reading is ten seconds."""
    wall = 0.0

    def read(also_ours: Sequence[int]) -> Counters:
        nonlocal wall
        wall += 10
        return Counters(
            wall=wall, own=wall, busy=wall * (1 + other), total=wall * 4, steal=0.0, load_1min=1 + other
        )

    return LoadMonitor(read=read)


def examine(*models: str | Path, other: float = 0.0, **arguments: Any) -> doctor.Diagnosis:
    return doctor.diagnose(*map(str, models), effort=SMALL, monitor=monitor(other), **arguments)


def finding(found: doctor.Diagnosis, check: str) -> Finding:
    (one,) = [finding for finding in found.findings if finding.check == check]
    return one


def busy(other: float | None, *, is_busy: bool | None = None, reasons: Sequence[str] = ()) -> BusyReport:
    claim = bool(other) if is_busy is None else is_busy
    return BusyReport(claim, list(reasons), 10.0, 1.0, other, other, 0.0, 1.0, 1.0)


def measured(**changed: Any) -> Measured:
    facts: dict[str, Any] = {
        "device": "cpu",
        "buffer_bytes": 256 << 20,
        "cache_bytes": 32 << 20,
        "read": Rate(30e9, 28e9, 31e9, 9),
        "matmul": {"float32": Rate(100e9, 90e9, 110e9, 5), "bfloat16": Rate(400e9, 390e9, 410e9, 5)},
        "matmul_side": {"float32": 1024, "bfloat16": 2048},
        "few_tokens": {"float32": 4.0, "bfloat16": 1.01},
        "seconds": 2.0,
    }
    return Measured(**{**facts, **changed})


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measure little, in an empty folder with an empty cache, also when called as a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(examination, "Effort", lambda: SMALL)
    monkeypatch.setattr(examination, "SHORTEST_INTERVAL", 0.0)


# ---- Bounds -----------------------------------------------------------------------------------------


def test_the_least_time_of_a_step_is_its_bytes_over_the_bandwidth() -> None:
    """10 GB of weights and 2 GB of KV at 40 GB/s take 300 ms."""
    bound = step_bound("m", 10 * 10**9, 2 * 10**9, 40e9)
    assert bound.seconds == pytest.approx(0.3)
    assert bound.tokens_per_second == pytest.approx(10 / 3)


@pytest.mark.parametrize(("weight_bytes", "bandwidth"), [(0, 1e9), (10, 0.0)])
def test_a_bound_from_nothing_is_refused(weight_bytes: int, bandwidth: float) -> None:
    """No weights or no bandwidth is an error, not an infinite rate."""
    with pytest.raises(ValueError, match="above 0"):
        step_bound("m", weight_bytes, 0, bandwidth)


def test_the_ridge_is_where_arithmetic_takes_as_long_as_reading() -> None:
    """At 100 GB/s and 1 TFLOP/s a bfloat16 weight is read in the time of 10 tokens, a float32 one in 20."""
    assert bounds.ridge_tokens(2, 1e12, 100e9) == pytest.approx(10)
    assert bounds.ridge_tokens(4, 1e12, 100e9) == pytest.approx(20)


def test_the_table_holds_the_speedups_of_leviathan() -> None:
    """With c = .1: k = 1 at .5 gives 1.5 / 1.1, k = 3 at .7 gives 2.533 / 1.3; k = 1 breaks even at .1."""
    table = {row.label: row for row in bounds.rows(0.1, 6)}
    assert table["k = 1"].speedups[0] == pytest.approx(1.5 / 1.1)
    assert table["k = 3"].speedups[1] == pytest.approx((1 + 0.7 + 0.49 + 0.343) / 1.3)
    assert table["k = 5"].speedups[2] == pytest.approx((1 - 0.9**6) / 0.1 / 1.5)
    assert table["k = 1"].break_even == pytest.approx(0.1)
    # Three tokens break even where a + a^2 + a^3 = 3 c: at a = .5 that sum is .875.
    assert bounds.rows(0.875 / 3, 6)[1].break_even == pytest.approx(0.5)


def test_the_best_k_stays_within_the_ridge() -> None:
    """A free draft would be drafted for ever; the best k is one below the ridge, and 32 without one."""
    assert bounds.rows(0.0, 6.9)[-1].k == (5, 5, 5)
    assert bounds.rows(0.0, None)[-1].k[-1] == 32
    assert bounds.rows(0.0, 0.5)[-1].k == (0, 0, 0)
    assert bounds.rows(1.2, None)[-1].k == (0, 0, 0)


def test_rows_beyond_the_ridge_are_marked() -> None:
    """With a ridge of 4 tokens, k = 3 is free and k = 5 is not; without a ridge nobody knows."""
    assert [row.verification_is_free for row in bounds.rows(0.1, 4)] == [True, True, False, True]
    assert [row.verification_is_free for row in bounds.rows(0.1, None)] == [None] * 4


def test_the_cost_ratio_counts_the_kv_of_both() -> None:
    """The cost ratio is the draft's least time over the target's, KV included."""
    target, draft = step_bound("t", 900, 100, 1.0), step_bound("d", 150, 50, 1.0)
    assert bounds.bounds(target, draft, None).cost_ratio == pytest.approx(0.2)
    assert bounds.bounds(target, None, None).cost_ratio == 0


@pytest.mark.parametrize(
    ("draft_bytes", "ridge", "few", "words"),
    [
        (100, 8.0, 1.0, ["costs 0.10 of a target step", "nothing below acceptance 0.10", "Up to 8 tokens"]),
        (100, 8.0, 3.0, ["Measured, it is not free below it either: 4 tokens take 3.0 times one."]),
        (1000, None, None, ["does not pay even at acceptance 0.9", "this dtype was not measured"]),
        (None, 8.0, None, ["A draft that costs nothing makes", "by the bytes, never loses"]),
    ],
)
def test_the_sentence_says_what_the_table_shows(
    draft_bytes: int | None, ridge: float | None, few: float | None, words: list[str]
) -> None:
    """Cost, best speedup, break-even and the ridge are told in words."""
    draft = None if draft_bytes is None else step_bound("d", draft_bytes, 0, 1.0)
    told = render.sentence(bounds.bounds(step_bound("t", 1000, 0, 1.0), draft, ridge), few)
    for word in words:
        assert word in told


# ---- Measuring --------------------------------------------------------------------------------------


def test_measuring_gives_every_rate_and_calls_the_monitor() -> None:
    """Each dtype has a rate and a ratio; the median lies between the lowest and the highest."""
    ticks: list[None] = []
    found = measure.measure("cpu", ("float32", "bfloat16"), SMALL, lambda: ticks.append(None))
    assert len(ticks) == 3
    assert found.buffer_bytes == 1 << 20
    assert set(found.matmul) == set(found.few_tokens) == {"float32", "bfloat16"}
    for rate in (found.read, *found.matmul.values()):
        assert 0 < rate.lowest <= rate.median <= rate.highest
        assert rate.repeats >= 3
    assert found.matmul_side == {"float32": 32, "bfloat16": 32}


def test_a_square_product_grows_until_it_takes_long_enough() -> None:
    """With no time asked for the first side is taken, with all the time in the world the largest."""
    cpu = torch.device("cpu")
    first, _ = measure._matmul(torch.float32, cpu, Effort(largest_side=512, long_enough=0, seconds=0))
    last, _ = measure._matmul(torch.float32, cpu, Effort(largest_side=600, long_enough=9, seconds=0))
    assert (first, last) == (256, 512)


def test_a_dtype_the_device_cannot_multiply_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be measured has no rate, rather than one of zero, and the finding says so."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("not implemented")

    monkeypatch.setattr(measure, "_matmul", refuse)
    found = measure.measure("cpu", ("bfloat16",), SMALL, lambda: None)
    assert found.matmul == {} == found.few_tokens
    assert [f.status for f in machine.rate_findings(found) if f.check == "matmul"] == ["warning"]


def test_caches_shared_by_cores_count_once(tmp_path: Path) -> None:
    """Two cores on one 32 MiB cache and two on another have 64 MiB, whatever their smaller caches."""
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        for index, (level, size, cores) in enumerate(((2, "1024K", str(cpu)), (3, "32768K", shared))):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, value in (("level", str(level)), ("size", size), ("shared_cpu_list", cores)):
                (folder / name).write_text(value + "\n")
    assert measure._last_cache_bytes(tmp_path) == 64 << 20
    assert measure._last_cache_bytes(tmp_path / "none") is None


def test_the_buffer_is_far_larger_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 MiB, four times a larger cache, and never more than a quarter of what is free."""
    memory = type("Memory", (), {"available": 64 << 30})
    monkeypatch.setattr(measure.psutil, "virtual_memory", lambda: memory)
    cpu = torch.device("cpu")
    assert measure._buffer_bytes(cpu, None) == 256 << 20
    assert measure._buffer_bytes(cpu, 100 << 20) == 400 << 20
    memory.available = 400 << 20
    assert measure._buffer_bytes(cpu, 100 << 20) == 100 << 20


# ---- Findings about the installation ----------------------------------------------------------------


def versions(**known: str) -> Any:
    return lambda package: known.get(package)


def test_requirements_that_hold_are_one_line() -> None:
    """Versions at the bound count, a local part is no matter, and extras are not required."""
    stated = (">=3.11", ["torch>=2.5", "rich>=13.7", 'pytest>=8.2; extra == "dev"'])
    (one,) = installed.check_requirements(
        stated, version_of=versions(torch="2.13.0+cpu", rich="13.7"), python="3.11.0"
    )
    assert (one.status, one.message) == ("ok", "all 2 required packages are as required")


@pytest.mark.parametrize(
    ("stated", "message", "remedy"),
    [
        ((None, ["torch>=2.5"]), "torch 2.4.1 is installed, >=2.5 is required", 'pip install "torch>=2.5"'),
        ((None, ["gguf>=0.10"]), "gguf is not installed, >=0.10 is required", 'pip install "gguf>=0.10"'),
        ((None, ["gguf"]), "gguf is not installed, any version is required", 'pip install "gguf"'),
        ((">=3.11", []), "python 3.10.2 is installed, >=3.11 is required", "use a Python within that range"),
    ],
)
def test_what_is_missing_or_too_old_is_a_problem(stated: Any, message: str, remedy: str) -> None:
    """A version below its lower bound is named, with the call that mends it."""
    (one,) = installed.check_requirements(stated, version_of=versions(torch="2.4.1"), python="3.10.2")
    assert one == Finding("requirements", "problem", message, remedy)


def test_a_checkout_that_is_not_installed_is_a_warning() -> None:
    """Without metadata nothing can be compared, which is not the same as nothing being wrong."""
    (one,) = installed.check_requirements(None)
    assert one.status == "warning"
    assert one.remedy is not None


def test_the_requirements_read_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed package states its Python and torch; one of another name states nothing."""
    stated = installed.stated_requirements()
    if stated is not None:
        assert stated[0] == ">=3.11"
        assert any(text.startswith("torch>=") for text in stated[1])
    monkeypatch.setattr(installed, "_DISTRIBUTION", "no-such-distribution")
    assert installed.stated_requirements() is None


def test_engines_are_named_with_what_they_lack() -> None:
    """An engine without its package is not installed; a package without an adapter is said to be so."""
    states = installed.engine_states(importable=lambda package: package in ("torch", "llama_cpp"))
    by_name = {state.name: state for state in states}
    assert by_name["local"].known
    assert by_name["local"].installed
    assert by_name["simulated"].package is None
    assert by_name["vllm"].installed is False
    states = [
        installed.EngineState("local", True, "torch", True),
        installed.EngineState("vllm", True, "vllm", False),
        installed.EngineState("sglang", False, "sglang", True),
    ]
    told = installed.engines_finding(states).message
    assert told == ("local; not installed: vllm; installed, but this specbench has no adapter: sglang")


def test_a_folder_is_not_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder called like an engine in the working directory does not count as the engine."""
    (tmp_path / "an_engine_of_that_name").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not installed._importable("an_engine_of_that_name")
    assert not installed._importable("no.such.package")
    assert installed._importable("json")


def test_looking_for_models_writes_nothing(tmp_path: Path) -> None:
    """An alias that was not fetched is said to be so, and no cache folder appears; then it is there."""
    (before,) = [state for state in installed.model_states() if state.name == "smollm2"]
    assert before.cached is False
    assert not (tmp_path / "cache").exists()
    folder = tmp_path / "cache" / "models" / "smollm2" / "model"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    assert "smollm2 (on this machine)" in installed.models_finding(installed.model_states()).message


def test_a_torch_that_cannot_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor survives a broken torch, says so, and measures nothing."""
    problem = Finding("torch", "problem", "torch cannot be imported: no such file", "reinstall torch")
    monkeypatch.setattr(examination, "_torch_problem", lambda: problem)
    found = examine("some-model")
    assert problem in found.findings
    assert found.measured is None
    assert "1 problem found." in doctor.text(found)
    assert json.loads(doctor.document(found))["measured"] is None


def test_the_reason_why_torch_fails_is_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever importing torch raises becomes one line."""
    assert examination._torch_problem() is None
    monkeypatch.setitem(sys.modules, "torch", None)
    found = examination._torch_problem()
    assert found is not None
    assert found.status == "problem"
    assert "\n" not in found.message


# ---- Findings about the machine ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "cores", "quota", "other", "status", "words"),
    [
        (2, 2, None, 0.1, "ok", "2 torch threads on 2 cores, of which 1.9 free"),
        (4, 2, None, 0.0, "warning", "OMP_NUM_THREADS=2"),
        (4, 8, 2.0, 0.0, "warning", "OMP_NUM_THREADS=2"),
        (2, 2, None, 1.2, "warning", "OMP_NUM_THREADS=1"),
        (1, 1, None, 0.9, "ok", "1 torch thread on 1 core"),
        (2, 2, None, None, "ok", "2 torch threads on 2 cores"),
        (2, None, None, None, "warning", "unknown"),
    ],
)
def test_threads_are_held_against_the_free_cores(
    threads: int, cores: int | None, quota: float | None, other: float | None, status: str, words: str
) -> None:
    """More threads than free cores are a warning that names the number to set; one thread never is."""
    found = machine.threads_finding(threads, cores, quota, busy(other, is_busy=bool(other and other > 0.25)))
    assert found.status == status
    assert words in f"{found.message} {found.remedy}"


def test_a_busy_machine_is_a_warning_and_not_knowing_is_one_too() -> None:
    """The limits that were exceeded are named; a machine that does not tell is not called quiet."""
    found = machine.quiet_finding(busy(1.5, reasons=["other processes used 1.50 cores"]))
    assert found.status == "warning"
    assert "1.50 cores" in found.message
    assert machine.quiet_finding(busy(None, is_busy=False)).status == "warning"
    assert machine.quiet_finding(busy(0.01, is_busy=False)).status == "ok"


@pytest.mark.parametrize(
    ("free", "status", "words"),
    [(8 << 30, "ok", "8.6 GB free"), (1 << 30, "warning", "smaller models"), (None, "warning", "unknown")],
)
def test_little_memory_is_a_warning(free: int | None, status: str, words: str) -> None:
    """Below 2 GiB, or unknown, memory is a warning."""
    found = machine.memory_finding(free, "cpu")
    assert found.status == status
    assert words in f"{found.message} {found.remedy}"


def test_a_containers_limit_is_seen(tmp_path: Path) -> None:
    """What a container may still use is its limit less what it uses, file cache not counted."""
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 400\n")
    assert machine._group_memory(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._group_memory(tmp_path) is None
    assert machine._group_memory(tmp_path / "none") is None


def test_the_disk_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    """A results folder that does not exist yet is judged by its parent."""
    found = machine.space(tmp_path / "not" / "there")
    assert found.writable
    assert found.free_bytes is not None


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_noticed(tmp_path: Path) -> None:
    """A read-only parent makes the folder unusable."""
    tmp_path.chmod(0o500)
    assert not machine.space(tmp_path / "results").writable
    tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("space", "status", "words"),
    [
        (machine.Space(50 << 30, True), "ok", "53.7 GB free"),
        (
            machine.Space(100 << 20, True),
            "warning",
            "free some space, or choose another folder with --output",
        ),
        (machine.Space(50 << 30, False), "warning", "cannot be written to"),
        (machine.Space(None, True), "ok", "unknown free"),
    ],
)
def test_a_full_or_read_only_disk_is_a_warning(space: machine.Space, status: str, words: str) -> None:
    """Less than 1 GiB, or no right to write, is a warning that names the option."""
    found = machine.disk_finding("results", space, "--output")
    assert found.status == status
    assert words in f"{found.message} {found.remedy}"


def environment(*accelerators: dict[str, Any]) -> dict[str, Any]:
    return {"hardware": {"cpu": "A Processor", "cores": 8, "accelerators": list(accelerators)}}


def test_an_idle_accelerator_is_a_warning() -> None:
    """On CPU beside a CUDA device the remedy is to use it."""
    card = {"name": "A Card", "memory_bytes": 80 * 10**9}
    assert machine.device_finding("cpu", environment()).status == "ok"
    idle = machine.device_finding("cpu", environment(card))
    assert (idle.status, idle.remedy) == ("warning", "try --device cuda")
    assert machine.device_finding("cuda", environment(card)).message.startswith("cuda: A Card (80.0 GB)")


def test_rates_are_told_with_their_spread() -> None:
    """Bandwidth carries its repeats and range; a dtype slow for few tokens names one that is not."""
    told = machine.rate_findings(measured())
    assert told[0].message == "30 GB/s, median of 9 reads of 268 MB (28 to 31)"
    assert told[1].message == "100 GFLOP/s float32 (side 1024), 400 GFLOP/s bfloat16 (side 2048)"
    assert (told[2].status, told[2].remedy) == ("warning", "try --dtype bfloat16")
    assert told[3].status == "ok"


def test_a_read_from_the_cache_is_a_warning() -> None:
    """A buffer that hardly exceeds the cache gives a rate that is too high."""
    told = machine.rate_findings(measured(cache_bytes=200 << 20))
    assert told[0].status == "warning"


def test_where_all_dtypes_are_slow_none_is_recommended() -> None:
    """The remedy names a dtype only if it is faster."""
    told = machine.rate_findings(measured(few_tokens={"float32": 4.0, "bfloat16": 3.9}))
    assert [one.remedy for one in told[2:]] == ["expect less than the bounds"] * 2


# ---- Findings about models --------------------------------------------------------------------------


def test_a_pair_that_fits_has_bounds(saved_model: Path) -> None:
    """Both load, decode and share their tokens; c is near 1 for models of one size, which cannot pay."""
    found = examine(saved_model / "target", saved_model / "draft")
    for check in ("target", "draft", "vocabulary"):
        assert finding(found, check).status == "ok"
    assert found.vocabulary_fits
    assert found.bounds is not None
    assert found.bounds.cost_ratio == pytest.approx(1)
    assert "cannot pay" in finding(found, "bound").message
    # The context of 128 is shorter than the 1,000 tokens counted elsewhere; 3 layers, 2 heads of 8, float32.
    assert found.target is not None
    assert found.target.kv_per_token == 3 * 2 * 2 * 8 * 4
    assert found.bounds.target.kv_bytes == 128 * found.target.kv_per_token
    # The fastest read and product: the median of a busy machine would be no bound.
    assert found.measured is not None
    read, product = found.measured.read.highest, found.measured.matmul["float32"].highest
    step = found.bounds.target
    assert step.seconds == pytest.approx((step.weight_bytes + step.kv_bytes) / read)
    assert found.bounds.ridge_tokens == pytest.approx(4 * product / (2 * read))
    assert "Nothing is wrong." not in doctor.text(found)


def test_a_target_alone_is_bounded_with_a_draft_that_costs_nothing(saved_model: Path) -> None:
    """Without a draft the table is that of an n-gram table, and dtype decides the bytes."""
    found = examine(saved_model / "target", dtype="bfloat16")
    whole = examine(saved_model / "target", dtype="float32")
    assert found.bounds is not None
    assert whole.bounds is not None
    assert found.bounds.cost_ratio == 0
    assert found.bounds.target.weight_bytes * 2 == whole.bounds.target.weight_bytes
    assert "such as ngram" in doctor.text(found)


def test_other_ids_are_mapped(saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens in another order fit, and how many were mapped is told."""
    monkeypatch.setattr("conftest.WORDS", ("<eos>", "<unk>", *reversed(WORDS[2:-2]), "one", "two"))
    other = tiny_models.build("llama", vocab_size=len(WORDS), eos_token_id=0)
    save(tmp_path / "other", other)
    found = examine(saved_model / "target", tmp_path / "other")
    assert finding(found, "vocabulary").status == "ok"
    assert "22 of its 24 tokens are mapped" in finding(found, "vocabulary").message
    assert "the other 2 of the target's 24 are never drafted" in finding(found, "vocabulary").message
    assert found.vocabulary_fits
    assert found.bounds is not None


def test_another_vocabulary_is_a_problem(
    saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal size with other tokens is a problem, named, without a table."""
    monkeypatch.setattr("conftest.WORDS", ("<eos>", "<unk>", *(word.upper() for word in WORDS[2:])))
    other = tiny_models.build("llama", vocab_size=len(WORDS), eos_token_id=0)
    save(tmp_path / "other", other)
    found = examine(saved_model / "target", tmp_path / "other")
    assert finding(found, "vocabulary").status == "problem"
    assert "shared ids differ" in finding(found, "vocabulary").message
    assert found.bounds is None
    assert found.outcome == "problem"


def test_a_damaged_model_is_a_problem(saved_model: Path) -> None:
    """Weights that cannot be read are a finding; the rest of the examination goes on."""
    (saved_model / "draft" / "model.safetensors").write_bytes(b"nothing")
    found = examine(saved_model / "target", saved_model / "draft")
    assert finding(found, "draft").status == "problem"
    assert "\n" not in finding(found, "draft").message
    assert finding(found, "target").status == "ok"
    assert found.vocabulary_fits is None
    assert found.bounds is None
    assert found.measured is not None


def test_a_model_that_cannot_be_decoded_in_process_is_a_problem(tmp_path: Path) -> None:
    """A context too short for the probe is told as the model's problem."""
    model = tiny_models.build("llama", vocab_size=len(WORDS), eos_token_id=0, max_position_embeddings=8)
    found = examine(save(tmp_path / "short", model))
    assert finding(found, "target").status == "problem"
    assert "too short" in finding(found, "target").message


def test_a_model_larger_than_memory_is_not_loaded(saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot fit is said before the attempt; half precision needs half as much."""
    model = resolve(str(saved_model / "target"))
    size = (saved_model / "target" / "model.safetensors").stat().st_size
    assert pair.memory_problem("target", model, "float32", size - 1) is not None
    assert pair.memory_problem("target", model, "bfloat16", size - 1) is None
    assert pair.memory_problem("target", model, "float32", None) is None
    monkeypatch.setattr(machine, "free_memory", lambda device: 10)
    found = examine(saved_model / "target")
    assert finding(found, "target").status == "problem"
    assert found.target is None


def test_an_embedding_is_read_only_if_it_is_the_head() -> None:
    """An untied table is looked up, not read; a tied one is the head, and read once."""
    untied = tiny_models.build("llama")
    rows = untied.get_input_embeddings().weight
    total = sum(p.numel() * 4 for p in untied.parameters())
    assert pair.weights_read(untied) == total - rows.numel() * 4
    tied = tiny_models.build("llama", tie_word_embeddings=True)
    assert pair.weights_read(tied) == sum(p.numel() * 4 for p in tied.parameters())


def test_a_sliding_window_bounds_the_kv_that_is_read() -> None:
    """A layer with a window reads no more than the window, a full one the whole context."""
    config = transformers.MistralConfig(sliding_window=6)
    model = type("Model", (), {"config": config})
    cache = type("Cache", (), {"keys": {0: torch.zeros(1, 2, 9, 8)}, "values": {0: torch.zeros(1, 2, 9, 8)}})
    assert pair._kv_read(model, cache, 100) == 6 * 2 * 2 * 8 * 4
    config.layer_types = ["full_attention"]
    assert pair._kv_read(model, cache, 100) == 100 * 2 * 2 * 8 * 4


def test_a_mixture_of_experts_has_no_bound(saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step reads some of the weights the doctor says so instead of bounding by all of them."""
    config = transformers.MixtralConfig(num_local_experts=4)
    assert pair.weights_read(type("Model", (), {"config": config})) is None
    monkeypatch.setattr(pair, "weights_read", lambda model: None)
    found = examine(saved_model / "target")
    assert "mixture of experts" in finding(found, "bound").message
    assert found.bounds is None


# ---- How it is told ---------------------------------------------------------------------------------


def test_the_worst_finding_is_the_outcome() -> None:
    """Problem outweighs warning, warning outweighs ok, and nothing found is ok."""
    ok, warning, problem = (Finding("x", s, "") for s in ("ok", "warning", "problem"))  # type: ignore[arg-type]
    assert worst([]) == "ok"
    assert worst([ok, warning]) == "warning"
    assert worst([warning, problem, ok]) == "problem"


def test_every_finding_is_a_line_that_begins_with_its_mark() -> None:
    """Marks are words; a remedy follows its finding."""
    found = examine(other=1.5)
    lines = doctor.text(found).splitlines()
    for one in found.findings:
        begin = [one.status, *one.check.split()]
        (at,) = [
            i for i, line in enumerate(lines) if line.split()[: len(begin)] == begin and one.message in line
        ]
        assert (one.remedy is not None) == ("to do: " in lines[at + 1])
    assert not any("\x1b" in line for line in lines)


def test_bounds_from_a_busy_machine_are_said_to_be_so(saved_model: Path) -> None:
    """What was measured beside other work may be too low, and the text says so."""
    told = " ".join(doctor.text(examine(saved_model / "target", other=1.5)).split())
    assert "The machine was busy" in told
    assert "The machine was busy" not in doctor.text(examine(saved_model / "target"))


def test_the_table_marks_what_is_beyond_the_ridge(saved_model: Path) -> None:
    """A row whose verification is not free has a mark, and the mark is explained."""
    found = examine(saved_model / "target")
    found.bounds = bounds.bounds(step_bound("t", 2000, 0, 1.0), step_bound("d", 400, 0, 1.0), 4.0)
    told = doctor.text(found)
    rows = {line.split("  ")[1]: line.split() for line in told.splitlines() if line.startswith("  ")}
    assert rows["k = 1"][3:] == ["1.25", "1.42", "1.58", "0.20"]  # (1 + α) / 1.2
    assert rows["k = 5 *"][4] == "0.98"  # 1.96875 / 2
    assert "k = 3 *" not in rows
    assert rows["best k"][2:4] == ["1.25", "(k=1)"]
    assert "* k + 1 tokens are beyond the ridge" in told


def test_the_command_prints_one_document(saved_model: Path, capsys: Captured) -> None:
    """With --json stdout is one document with the numbers behind the findings; the exit code is 0."""
    words = [
        "doctor",
        "--json",
        "--target",
        str(saved_model / "target"),
        "--draft",
        str(saved_model / "draft"),
    ]
    assert main(words) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert printed.err == ""
    assert document["schema_version"] == 1
    assert document["outcome"] in ("ok", "warning")
    assert set(document["findings"][0]) == {"check", "status", "message", "remedy"}
    assert document["environment"]["versions"]["torch"]
    assert document["measured"]["read"]["median"] > 0
    assert set(document["measured"]["matmul"]) == {"float32", "bfloat16"}
    assert {engine["name"] for engine in document["engines"]} >= {"local", "vllm"}
    assert document["aliases"][0].keys() == {"name", "summary", "cached"}
    assert document["target"]["parameters"] > 0
    assert document["bounds"]["rows"][0]["label"] == "k = 1"
    assert document["busy"] is not None


def test_a_busy_machine_exits_0(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor reports what it found; that others are working is not an error of the installation."""
    monkeypatch.setattr(examination, "LoadMonitor", lambda: monitor(1.5))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "the machine is busy" in out
    assert "warning" in out.splitlines()[-1]


def test_a_failed_check_exits_1(saved_model: Path, capsys: Captured) -> None:
    """A model that cannot be loaded is a problem and the exit code says so."""
    (saved_model / "target" / "model.safetensors").write_bytes(b"nothing")
    assert main(["doctor", "--target", str(saved_model / "target")]) == 1
    assert "\nproblem  target" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft", "x"], "--draft needs a target"),
        (["--dtype", "bfloat"], "no dtype 'bfloat'; did you mean 'bfloat16'?"),
        (["--device", "toaster"], "no device 'toaster'"),
        (["--device", "meta"], "device 'meta' cannot hold a model here"),
        (["--target", "smolm2"], "no model 'smolm2'; did you mean 'smollm2'?"),
        (["--target", "./none"], "no model at ./none"),
        (["--traget", "x"], "did you mean '--target'?"),
    ],
)
def test_a_wrong_call_exits_2_with_one_line(words: list[str], message: str, capsys: Captured) -> None:
    """Names that lead nowhere are refused before anything is measured."""
    assert main(["doctor", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err.splitlines()[0]
    assert len(printed.err.splitlines()) in (1, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_cuda_device_is_wrong_usage() -> None:
    """Asking for CUDA where there is none is one line, with the device that exists as the way out."""
    with pytest.raises(UsageError, match="device 'cuda' is not available"):
        examine(device="cuda")
