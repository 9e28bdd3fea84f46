"""Where a number came from, and whether the machine was quiet while it was taken.

`fingerprint` records the machine, the versions and the call; `comparable` says when absolute times of two
runs must not be compared; `LoadMonitor` notices other work on the machine during a measurement.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, Protocol, TypeAlias

import psutil

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None

OTHER_CPU_LIMIT = 0.25
"""Cores that other processes may use on average before the machine counts as busy."""

STEAL_LIMIT = 0.05
"""Share of CPU time the hypervisor may take for other guests before the machine counts as busy."""

SHORTEST_INTERVAL = 1.0
"""Seconds below which CPU shares are not derived: the counters advance in steps of 10 ms per core."""

_PACKAGES = {
    "specbench": "specbench-llm",
    "torch": "torch",
    "transformers": "transformers",
    "numpy": "numpy",
    "scipy": "scipy",
    "llguidance": "llguidance",
}

# What decides how long a step takes. The rest of the fingerprint (date, command, commit) may differ.
_TIMING = (
    ("hardware", "cpu"),
    ("hardware", "cores"),
    ("hardware", "cpu_quota"),
    ("hardware", "memory_bytes"),
    ("hardware", "accelerators"),
    ("system", "os"),
    ("system", "machine"),
    ("system", "python"),
    ("versions", "torch"),
    ("versions", "transformers"),
    ("torch", "threads"),
    ("torch", "interop_threads"),
    ("torch", "cuda"),
    ("torch", "cudnn"),
    ("models", None),
)
_NEEDED = {("hardware", "cpu"), ("hardware", "cores"), ("versions", "torch")}


class ModelIdentity(Protocol):
    """What is recorded of a model; `specbench.models.LoadedModel` has it."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def parameters(self) -> int: ...


def fingerprint(models: Sequence[ModelIdentity] = ()) -> dict[str, JSON]:
    """Describe the machine, the software and the call; what cannot be found out is None.

    The part `torch` is None unless torch has been imported already: asking must not load it.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(sys.argv),
        "hardware": {
            "cpu": _cpu_name(),
            "cores": _cores(),
            "cpu_quota": _cpu_quota(),
            "memory_bytes": psutil.virtual_memory().total,
            "accelerators": _accelerators(),
        },
        "system": {
            "os": f"{platform.system()} {platform.release()}",
            "machine": platform.machine(),
            "python": platform.python_version(),
        },
        "versions": {name: _version(package) for name, package in _PACKAGES.items()},
        "torch": _torch(),
        "git": _git(),
        "models": [
            {
                "name": PurePath(model.name).name if PurePath(model.name).is_absolute() else model.name,
                "fingerprint": model.fingerprint,
                "dtype": model.dtype,
                "device": model.device,
                "parameters": model.parameters,
            }
            for model in models
        ],
    }


def comparable(a: dict[str, JSON], b: dict[str, JSON]) -> list[str]:
    """Name what makes absolute times of two fingerprints incomparable; empty if nothing does.

    Ratios and counts may be compared all the same. A processor, core count or torch version that was not
    recorded counts as a difference, even if it is missing on both sides: unknown is not equal. The commit
    and the version of specbench do not count, because comparing them is what a gate is for.
    """
    differences = []
    for part, name in _TIMING:
        left, right = _lookup(a, part, name), _lookup(b, part, name)
        label = part if name is None else f"{part}.{name}"
        if left != right:
            differences.append(f"{label}: {_brief(left)} / {_brief(right)}")
        elif left is None and (part, name) in _NEEDED:
            differences.append(f"{label}: not recorded")
    return differences


def _lookup(record: dict[str, JSON], part: str, name: str | None) -> JSON:
    found = record.get(part)
    if name is None:
        # The name is how the user wrote it; the fingerprint, dtype and device are what was run.
        models = found if isinstance(found, list) else []
        return [
            {key: model.get(key) for key in ("fingerprint", "dtype", "device")}
            for model in models
            if isinstance(model, dict)
        ]
    value = found.get(name) if isinstance(found, dict) else None
    # The kernel keeps a little for itself, and not always the same.
    return round(value / 2**30) if name == "memory_bytes" and isinstance(value, int) else value


def _brief(value: JSON) -> str:
    if isinstance(value, list):
        entries = [
            " ".join(str(part)[:24] for part in entry.values()) if isinstance(entry, dict) else str(entry)
            for entry in value
        ]
        return ", ".join(entries) or "none"
    return "not recorded" if value is None else str(value)


# -- the parts of a fingerprint -----------------------------------------------------------------------


def _command(argv: Sequence[str]) -> str:
    """Return the call as one line, the program by its base name."""
    program = PurePath(argv[0]) if argv and argv[0] else PurePath("python")
    first = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return shlex.join([*first, *argv[1:]])


def _cpu_name() -> str | None:
    """Return the processor's marketing name where the system tells it."""
    cpuinfo = _read(Path("/proc/cpuinfo"))
    for line in (cpuinfo or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return value.strip()
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string")
    return platform.processor() or None


def usable_cores() -> int:
    """Count the cores this process can keep busy: those it may run on, or a container's quota of them."""
    return max(1, math.floor(min(_cores() or 1, _cpu_quota() or math.inf)))


def _cores() -> int | None:
    """Count the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _cpu_quota() -> float | None:
    """Return the cores a container's quota amounts to; None without a quota."""
    words = (_read(Path("/sys/fs/cgroup/cpu.max")) or "").split()
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        if package != _PACKAGES["specbench"]:
            return None
        # Run from a checkout that is not installed.
        from specbench import __version__

        return __version__


def _torch() -> dict[str, JSON] | None:
    """Return the settings of torch that decide its speed, if it is loaded."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    cuda = torch.cuda.is_available()
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
    }


def _accelerators() -> list[JSON] | None:
    """List the CUDA devices; None if torch is not loaded, so that nobody has looked."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": device.name, "memory_bytes": device.total_memory} for device in devices]


def _git() -> dict[str, JSON] | None:
    """Return the short commit of the current working tree and whether it has changes; None outside one."""
    status = _output("git", "--no-optional-locks", "status", "--porcelain", empty_is_none=False)
    if status is None:
        return None
    return {"commit": _output("git", "rev-parse", "--short=12", "HEAD"), "dirty": bool(status)}


def _output(*command: str, empty_is_none: bool = True) -> str | None:
    """Return what a short command prints, or None if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    text = result.stdout.strip()
    return None if empty_is_none and not text else text


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


# -- other work on the machine ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counters:
    """One reading: seconds since some start, summed over cores; None where the system does not say.

    `busy` is time in which a core ran anybody's code, `total` is all time there was, `steal` is time in
    which a core was ready but the hypervisor ran another guest, `own` is this measurement's share of `busy`.
    """

    wall: float
    own: float
    busy: float | None
    total: float | None
    steal: float | None
    load_1min: float | None


@dataclass(frozen=True, slots=True)
class BusyReport:
    """How quiet the machine was from start to report.

    `busy` claims that the limits were exceeded; False with `other_cpu` None means that nobody could tell.
    `own_cpu` and `other_cpu` are cores in use on average (`other_cpu_peak`: the highest between two samples
    at least a second apart), `steal` is a share of CPU time. The load averages are for the reader alone:
    they count our own threads too, and the minute before.
    """

    busy: bool
    reasons: list[str]
    wall: float
    own_cpu: float | None
    other_cpu: float | None
    other_cpu_peak: float | None
    steal: float | None
    load_at_start: float | None
    load_max: float | None


class LoadMonitor:
    """Watch what the machine does besides the measurement; a sample costs well below a millisecond.

    The machine is busy if other processes used more than `OTHER_CPU_LIMIT` cores on average, or if more
    than `STEAL_LIMIT` of the CPU time was stolen. Only the cores this process may run on are counted.
    """

    def __init__(
        self, *, also_ours: Sequence[int] = (), read: Callable[[Sequence[int]], Counters] | None = None
    ) -> None:
        """Prepare to watch.

        Args:
            also_ours: ids of processes that belong to the measurement, such as a server it started.
            read: takes one reading; replaced in tests.
        """
        self._also_ours = tuple(also_ours)
        self._read = _Reader() if read is None else read
        self._samples: list[Counters] = []

    def start(self) -> None:
        """Forget earlier samples and begin."""
        self._samples = [self._read(self._also_ours)]

    def sample(self) -> None:
        """Add a reading, so that a short burst of other work shows in the peak."""
        self._samples.append(self._read(self._also_ours))

    def report(self) -> BusyReport:
        """Take the last reading and judge the interval since `start`."""
        if not self._samples:
            raise RuntimeError("LoadMonitor.report() before start()")
        self.sample()
        first, last = self._samples[0], self._samples[-1]
        other, steal = _other_cpu(first, last), _steal(first, last)
        loads = [sample.load_1min for sample in self._samples if sample.load_1min is not None]
        reasons = []
        if other is not None and other > OTHER_CPU_LIMIT:
            reasons.append(f"other processes used {other:.2f} cores (limit {OTHER_CPU_LIMIT:g})")
        if steal is not None and steal > STEAL_LIMIT:
            reasons.append(f"{steal:.0%} of CPU time was stolen by other guests (limit {STEAL_LIMIT:.0%})")
        wall = last.wall - first.wall
        return BusyReport(
            busy=bool(reasons),
            reasons=reasons,
            wall=wall,
            own_cpu=(last.own - first.own) / wall if wall >= SHORTEST_INTERVAL else None,
            other_cpu=other,
            other_cpu_peak=self._peak(),
            steal=steal,
            load_at_start=first.load_1min,
            load_max=max(loads, default=None),
        )

    def _peak(self) -> float | None:
        """Return the highest use by others between samples far enough apart to tell."""
        peaks: list[float] = []
        earlier = self._samples[0]
        for sample in self._samples[1:]:
            other = _other_cpu(earlier, sample)
            if other is not None:
                peaks.append(other)
                earlier = sample
        return max(peaks, default=None)


def _other_cpu(first: Counters, last: Counters) -> float | None:
    """Return the cores that others used on average; rounding of the counters may not make it negative."""
    wall = last.wall - first.wall
    if first.busy is None or last.busy is None or wall < SHORTEST_INTERVAL:
        return None
    return max(0.0, (last.busy - first.busy - (last.own - first.own)) / wall)


def _steal(first: Counters, last: Counters) -> float | None:
    """Return the share of CPU time that was stolen."""
    if first.steal is None or last.steal is None or first.total is None or last.total is None:
        return None
    if last.wall - first.wall < SHORTEST_INTERVAL:
        return None
    total = last.total - first.total
    return (last.steal - first.steal) / total if total > 0 else None


class _Reader:
    """Take readings of this machine."""

    def __init__(self) -> None:
        self._self = psutil.Process()
        self._others: dict[int, psutil.Process] = {}
        self._own: dict[int, float] = {}
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        # Reading every core is dearer, so it is done only if this process is kept to some of them.
        self._cores = allowed if allowed is not None and len(allowed) < (psutil.cpu_count() or 0) else None

    def __call__(self, also_ours: Sequence[int]) -> Counters:
        times = self._cpu_times()
        try:
            load = os.getloadavg()[0]
        except (AttributeError, OSError):
            load = None
        idle = sum(time.idle + getattr(time, "iowait", 0.0) for time in times)
        # Linux counts a guest's time in `user` as well, so it must not be added again.
        total = sum(
            sum(time) - getattr(time, "guest", 0.0) - getattr(time, "guest_nice", 0.0) for time in times
        )
        has_steal = all(hasattr(time, "steal") for time in times)
        steal = sum(time.steal for time in times) if has_steal else None
        return Counters(
            wall=time.monotonic(),
            own=self._own_cpu(also_ours),
            busy=total - idle - (steal or 0.0),
            total=total,
            steal=steal,
            load_1min=load,
        )

    def _cpu_times(self) -> list[Any]:
        if self._cores is None:
            return [psutil.cpu_times()]
        per_core = psutil.cpu_times(percpu=True)
        return [per_core[core] for core in self._cores if core < len(per_core)]

    def _own_cpu(self, also_ours: Sequence[int]) -> float:
        """Return the CPU time of this process and those named; one that ended keeps its last."""
        own = self._self.cpu_times()
        # The children counted here have ended and been waited for.
        total = own.user + own.system + own.children_user + own.children_system
        for pid in also_ours:
            try:
                if pid not in self._others:
                    self._others[pid] = psutil.Process(pid)
                times = self._others[pid].cpu_times()
                self._own[pid] = times.user + times.system
            except psutil.Error:
                continue
        return total + sum(self._own.values())
