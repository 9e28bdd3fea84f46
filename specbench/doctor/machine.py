"""The machine as it stands: device, threads, other work, rates, memory and disk; what is wrong with each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from specbench.doctor.findings import Finding
from specbench.doctor.measure import SLOW_FEW_TOKENS, TOKENS, Measured
from specbench.environment import BusyReport

_LOW_MEMORY = 2 << 30
_LOW_DISK = 1 << 30


@dataclass(frozen=True, slots=True)
class Space:
    """Free bytes where something is written; None if the system does not tell."""

    free_bytes: int | None
    writable: bool


def free_memory(device: str) -> int | None:
    """Return the free bytes of a device's memory."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return min(psutil.virtual_memory().available, _group_memory() or psutil.virtual_memory().available)


def _group_memory(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return what a container's limit leaves; None without one. File cache counts as free."""
    try:
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return max(0, limit - used + int(statistics.get("inactive_file", 0)))


def space(folder: Path) -> Space:
    """Look at the disk under a folder that need not exist yet."""
    existing = next((parent for parent in (folder, *folder.absolute().parents) if parent.exists()), Path("/"))
    try:
        free = shutil.disk_usage(existing).free
    except OSError:
        free = None
    return Space(free, existing.is_dir() and os.access(existing, os.W_OK))


# -- findings -----------------------------------------------------------------------------------------


def device_finding(device: str, environment: Mapping[str, Any]) -> Finding:
    """Say what will decode, and which accelerators are left idle."""
    hardware = environment["hardware"]
    accelerators = hardware["accelerators"] or []
    names = ", ".join(f"{one['name']} ({_gb(one['memory_bytes'])})" for one in accelerators)
    cpu = f"{hardware['cpu'] or 'unknown processor'}, {_or_dash(hardware['cores'])} cores"
    if device == "cpu":
        message = f"cpu: {cpu}; " + (f"not used: {names}" if names else "no CUDA device")
        if names:
            return Finding("device", "warning", message, "try --device cuda")
        return Finding("device", "ok", message)
    return Finding("device", "ok", f"{device}: {names or 'accelerator'}; host {cpu}")


def threads_finding(threads: int, cores: int | None, quota: float | None, busy: BusyReport) -> Finding:
    """Compare torch's threads with the cores that are free for them."""
    limits = [float(limit) for limit in (cores, quota) if limit is not None]
    if not limits:
        return Finding("threads", "warning", f"{threads} torch threads; the number of cores is unknown")
    free = max(0.0, min(limits) - (busy.other_cpu or 0.0))
    message = f"{_plural(threads, 'torch thread')} on {_plural(min(limits), 'core')}"
    if busy.other_cpu is not None:
        message += f", of which {free:.1f} free"
    if threads > min(limits) or (busy.busy and threads > max(1.0, free)):
        remedy = f"set OMP_NUM_THREADS={max(1, int(free))}: a step waits for its slowest thread"
        return Finding("threads", "warning", message, remedy)
    return Finding("threads", "ok", message)


def quiet_finding(busy: BusyReport) -> Finding:
    """Say whether other work disturbed the measurement."""
    load = f", load average {busy.load_at_start:.1f}" if busy.load_at_start is not None else ""
    if busy.busy:
        message = f"the machine is busy: {'; '.join(busy.reasons)}{load}; rates below are too low"
        return Finding("quiet", "warning", message, "stop other work, then run this again")
    if busy.other_cpu is None:
        return Finding("quiet", "warning", f"it cannot be told whether the machine is busy{load}")
    return Finding("quiet", "ok", f"other processes use {busy.other_cpu:.2f} cores{load}")


def memory_finding(free: int | None, device: str) -> Finding:
    """Say how much memory is free."""
    if free is None:
        return Finding("memory", "warning", "free memory is unknown")
    where = "" if device == "cpu" else f" on {device}"
    if free < _LOW_MEMORY:
        return Finding(
            "memory", "warning", f"{_gb(free)} free{where}", "end other programs, or use smaller models"
        )
    return Finding("memory", "ok", f"{_gb(free)} free{where}")


def disk_finding(name: str, found: Space, option: str) -> Finding:
    """Say how much can be written to the results or the cache."""
    remedy = f"choose another folder with {option}"
    free = "unknown" if found.free_bytes is None else _gb(found.free_bytes)
    if not found.writable:
        return Finding(f"disk ({name})", "warning", f"the {name} folder cannot be written to", remedy)
    if found.free_bytes is not None and found.free_bytes < _LOW_DISK:
        return Finding(f"disk ({name})", "warning", f"{free} free", f"free some space, or {remedy}")
    return Finding(f"disk ({name})", "ok", f"{free} free")


def rate_findings(measured: Measured) -> list[Finding]:
    """State the two rates, and whether a few tokens cost as much as one."""
    read, size, cache = measured.read, measured.buffer_bytes, measured.cache_bytes
    message = (
        f"{_number(read.median / 1e9)} GB/s, median of {read.repeats} reads of {_gb(size)} "
        f"({_number(read.lowest / 1e9)} to {_number(read.highest / 1e9)})"
    )
    if cache is not None and size < 2 * cache:
        remedy = "free some memory: a larger buffer is needed"
        findings = [Finding("bandwidth", "warning", f"{message}, partly from the {_gb(cache)} cache", remedy)]
    else:
        findings = [Finding("bandwidth", "ok", message)]
    rates = [
        f"{_number(rate.median / 1e9)} GFLOP/s {name} (side {measured.matmul_side[name]})"
        for name, rate in measured.matmul.items()
    ]
    if rates:
        findings.append(Finding("matmul", "ok", ", ".join(rates)))
    else:
        findings.append(Finding("matmul", "warning", "this device multiplies none of the dtypes asked for"))
    for name, ratio in measured.few_tokens.items():
        message = f"{name}: a product with {TOKENS} tokens takes {ratio:.2f} times one with 1"
        if ratio > SLOW_FEW_TOKENS:
            others = [n for n, r in measured.few_tokens.items() if r < ratio / SLOW_FEW_TOKENS]
            message += ", so verification is not free"
            remedy = f"try --dtype {others[0]}" if others else "expect less than the bounds"
            findings.append(Finding("few tokens", "warning", message, remedy))
        else:
            findings.append(Finding("few tokens", "ok", message))
    return findings


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _number(value: float) -> str:
    """Write three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _plural(count: float, noun: str) -> str:
    return f"{count:g} {noun}" + ("" if count == 1 else "s")


def _or_dash(value: object) -> str:
    return "–" if value is None else str(value)
