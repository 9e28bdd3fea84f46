"""What a run records about its machine, and when it calls the machine busy."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from specbench import environment
from specbench.environment import Counters, LoadMonitor, comparable, fingerprint


@dataclass
class Model:
    name: str = "smollm2"
    fingerprint: str = "ab12"
    dtype: str = "float32"
    device: str = "cpu"
    parameters: int = 7


def test_fingerprint_is_json_and_complete() -> None:
    """Every part is present and survives JSON."""
    record = fingerprint([Model()])
    assert json.loads(json.dumps(record)) == record
    assert set(record) == {"date", "command", "hardware", "system", "versions", "torch", "git", "models"}
    hardware, versions, date = record["hardware"], record["versions"], record["date"]
    assert isinstance(hardware, dict)
    assert isinstance(versions, dict)
    assert isinstance(date, str)
    assert isinstance(hardware["cores"], int)
    assert hardware["cores"] >= 1
    assert versions["specbench"] is not None
    assert versions["torch"] is not None
    assert date.endswith("+00:00")
    assert record["models"] == [
        {"name": "smollm2", "fingerprint": "ab12", "dtype": "float32", "device": "cpu", "parameters": 7}
    ]


def test_fingerprint_tells_no_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program and a model given by its full path are recorded by their last part."""
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin" / "specbench"), "run", "--seed", "1"])
    record = fingerprint([Model(name=str(tmp_path / "llama"))])
    assert record["command"] == "specbench run --seed 1"
    assert str(tmp_path) not in json.dumps(record)


def test_command_run_as_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m specbench` is recorded as that, with arguments quoted for a shell."""
    monkeypatch.setattr(sys, "argv", ["somewhere/specbench/__main__.py", "explain", "two words"])
    assert fingerprint()["command"] == "python -m specbench explain 'two words'"


def test_importing_and_asking_do_not_load_torch() -> None:
    """A fingerprint taken before torch is imported leaves it unimported, and says so with None."""
    code = (
        "import sys; from specbench.environment import fingerprint; f = fingerprint();"
        "assert 'torch' not in sys.modules; assert f['torch'] is None;"
        "assert f['hardware']['accelerators'] is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_torch_settings_once_it_is_loaded() -> None:
    """With torch imported, its thread counts are recorded, and no accelerator is an empty list."""
    torch = pytest.importorskip("torch")
    record = fingerprint()
    assert isinstance(record["torch"], dict)
    assert record["torch"]["threads"] == torch.get_num_threads()
    assert isinstance(record["hardware"], dict)
    assert (record["hardware"]["accelerators"] == []) is not torch.cuda.is_available()


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_git_commit_and_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Outside a repository git is None; inside, the short commit and whether anything changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert fingerprint()["git"] is None
    _git(tmp_path, "init")
    assert fingerprint()["git"] == {"commit": None, "dirty": False}
    (tmp_path / "a").write_text("1")
    _git(tmp_path, "add", "a")
    _git(tmp_path, "commit", "-m", "a")
    clean: Any = fingerprint()["git"]
    assert clean["dirty"] is False
    assert len(clean["commit"]) == 12
    (tmp_path / "a").write_text("2")
    assert fingerprint()["git"] == {"commit": clean["commit"], "dirty": True}


def test_without_git_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where git is not installed, git is None."""
    monkeypatch.setenv("PATH", "")
    assert fingerprint()["git"] is None


def _record() -> dict[str, Any]:
    pytest.importorskip("torch")
    return copy.deepcopy(fingerprint([Model()]))


def test_equal_machines_are_comparable() -> None:
    """Date, command, commit and the name of the model do not make times incomparable."""
    a, b = _record(), _record()
    b |= {"date": "2031-01-01T00:00:00+00:00", "command": "specbench gate", "git": None}
    b["models"][0]["name"] = "other-name"
    b["hardware"]["memory_bytes"] += 4096
    assert comparable(a, b) == []


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("hardware", "cpu", "Another CPU"),
        ("hardware", "cores", 99),
        ("hardware", "accelerators", [{"name": "GPU", "memory_bytes": 1}]),
        ("versions", "torch", "0.1"),
        ("torch", "threads", 99),
    ],
)
def test_what_decides_times_is_named(part: str, name: str, value: object) -> None:
    """A difference in the machine or the library is named with both values."""
    a, b = _record(), _record()
    b[part][name] = value
    (difference,) = comparable(a, b)
    assert difference.startswith(f"{part}.{name}: ")
    assert " / " in difference


def test_another_dtype_or_model_is_a_difference() -> None:
    """The same machine with another dtype, or without the model, gives other times."""
    a, b = _record(), _record()
    b["models"][0]["dtype"] = "bfloat16"
    assert comparable(a, b) == ["models: ab12 float32 cpu / ab12 bfloat16 cpu"]
    b["models"] = []
    assert comparable(a, b) == ["models: ab12 float32 cpu / none"]


def test_unknown_is_not_equal() -> None:
    """A processor that was recorded on neither side is reported."""
    a, b = _record(), _record()
    a["hardware"]["cpu"] = b["hardware"]["cpu"] = None
    assert comparable(a, b) == ["hardware.cpu: not recorded"]
    assert comparable({}, {}) != []


IDLE = Counters(wall=100.0, own=10.0, busy=50.0, total=400.0, steal=1.0, load_1min=0.2)


def _after(wall: float, *, own: float, other: float, steal: float = 0.0, cores: int = 2) -> Counters:
    """Return the counters `wall` seconds later, in which others used `other` core-seconds."""
    assert IDLE.busy is not None
    assert IDLE.total is not None
    assert IDLE.steal is not None
    return Counters(
        wall=IDLE.wall + wall,
        own=IDLE.own + own,
        busy=IDLE.busy + own + other,
        total=IDLE.total + wall * cores,
        steal=IDLE.steal + steal,
        load_1min=1.5,
    )


def _monitor(*readings: Counters) -> LoadMonitor:
    """Return a monitor that reads from a script."""
    script = iter(readings)

    def read(also_ours: Sequence[int]) -> Counters:
        return next(script)

    return LoadMonitor(read=read)


def test_quiet_machine() -> None:
    """Our own work, however much, is not other people's."""
    monitor = _monitor(IDLE, _after(10, own=19.0, other=0.5))
    monitor.start()
    report = monitor.report()
    assert not report.busy
    assert report.reasons == []
    assert report.wall == 10
    assert report.own_cpu == pytest.approx(1.9)
    assert report.other_cpu == pytest.approx(0.05)
    assert report.steal == 0.0
    assert (report.load_at_start, report.load_max) == (0.2, 1.5)


def test_other_processes_make_it_busy() -> None:
    """More than a quarter of a core on average is busy, and the reason names the use and the limit."""
    monitor = _monitor(IDLE, _after(10, own=5.0, other=2.6))
    monitor.start()
    report = monitor.report()
    assert report.busy
    assert report.reasons == ["other processes used 0.26 cores (limit 0.25)"]


def test_steal_makes_it_busy() -> None:
    """More than 5 % of CPU time stolen is busy."""
    monitor = _monitor(IDLE, _after(10, own=5.0, other=0.0, steal=1.2))
    monitor.start()
    report = monitor.report()
    assert report.busy
    assert report.steal == pytest.approx(0.06)
    assert report.reasons == ["6% of CPU time was stolen by other guests (limit 5%)"]


def test_a_short_burst_shows_in_the_peak() -> None:
    """Two busy seconds in twenty are not busy on average, but the peak tells."""
    monitor = _monitor(
        IDLE, _after(9, own=0, other=0), _after(11, own=0, other=2), _after(20, own=0, other=2)
    )
    monitor.start()
    monitor.sample()
    monitor.sample()
    report = monitor.report()
    assert not report.busy
    assert report.other_cpu == pytest.approx(0.1)
    assert report.other_cpu_peak == pytest.approx(1.0)


def test_unknown_is_none() -> None:
    """Where the system tells nothing, or the interval is too short to tell, the report says None, not 0."""
    blind = replace(IDLE, busy=None, total=None, steal=None, load_1min=None)
    monitor = _monitor(blind, replace(blind, wall=IDLE.wall + 10, own=IDLE.own + 5))
    monitor.start()
    report = monitor.report()
    assert (report.other_cpu, report.other_cpu_peak, report.steal) == (None, None, None)
    assert (report.load_at_start, report.load_max) == (None, None)
    assert report.own_cpu == pytest.approx(0.5)
    assert not report.busy

    short = _monitor(IDLE, _after(0.3, own=0, other=0.3))
    short.start()
    assert (short.report().other_cpu, short._samples[0]) == (None, IDLE)


def test_rounding_never_makes_others_negative() -> None:
    """Counters that lag behind ours give 0."""
    monitor = _monitor(IDLE, _after(10, own=5, other=-0.02))
    monitor.start()
    assert monitor.report().other_cpu == 0.0


def test_report_needs_a_start() -> None:
    """A report without a start is a programming error."""
    with pytest.raises(RuntimeError, match="before start"):
        _monitor(IDLE).report()


def test_real_counters() -> None:
    """On this machine, a child named as ours adds to our own use, and a sample takes under a millisecond."""
    code = "import time\nend = time.time() + 30\nwhile time.time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        try:
            monitor = LoadMonitor(also_ours=[child.pid])
            monitor.start()
            time.sleep(environment.SHORTEST_INTERVAL + 0.2)
            report = monitor.report()
        finally:
            child.kill()
    assert report.own_cpu is not None
    assert report.own_cpu > 0.05
    assert report.other_cpu is None or report.other_cpu >= 0.0
    costs = []
    for _ in range(50):
        started = time.perf_counter()
        monitor.sample()
        costs.append(time.perf_counter() - started)
    assert min(costs) < 0.001


def test_a_process_that_ended_keeps_its_share() -> None:
    """Naming a process that no longer exists is not an error."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        pass
    monitor = LoadMonitor(also_ours=[child.pid])
    monitor.start()
    assert monitor.report().wall >= 0.0


def test_without_affinity_or_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without core affinity or load average, such as macOS or Windows, is read all the same."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "getloadavg", raising=False)
    monitor = LoadMonitor()
    monitor.start()
    assert monitor.report().load_max is None
    hardware = fingerprint()["hardware"]
    assert isinstance(hardware, dict)
    assert hardware["cores"] == os.cpu_count()


@pytest.mark.parametrize(
    ("cores", "quota", "usable"), [(8, None, 8), (8, 2.5, 2), (2, 6.0, 2), (4, 0.5, 1), (None, None, 1)]
)
def test_usable_cores_are_those_a_container_leaves(
    cores: int | None, quota: float | None, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota below the cores counts, whole cores of it and one at least."""
    monkeypatch.setattr(environment, "_cores", lambda: cores)
    monkeypatch.setattr(environment, "_cpu_quota", lambda: quota)
    assert environment.usable_cores() == usable
