"""What stands above the tables: where the numbers come from, and every reason to doubt them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specbench.report.wording import counted, listing, significant

if TYPE_CHECKING:
    from specbench.bench.store import Run


def context(run: Run) -> tuple[str, ...]:
    """Return the lines under the title: models, machine, software, what was asked for."""
    lines = (_models(run.config), _machine(run.environment), _software(run.environment), *_asked(run.config))
    return tuple(line for line in lines if line)


def banners(run: Run) -> tuple[str, ...]:
    """Return every reason not to take the tables at face value, the gravest first."""
    return tuple(_banners(run))


def workload_config(run: Run, name: str) -> Mapping[str, Any]:
    """Return what the configuration says of a workload; empty where it says nothing."""
    found = _mapping(run.config.get("workloads")).get(name)
    return _mapping(found)


def prompts_used(workload: Mapping[str, Any]) -> str:
    """Write how many prompts were measured: `32 prompts` or `12 of 32 prompts`."""
    used, available = _count(workload.get("prompts")), _count(workload.get("available"))
    if used is None:
        return ""
    if available is not None and available > used:
        return f"{used} of {counted(available, 'prompt')}"
    return counted(used, "prompt")


def _banners(run: Run) -> Iterator[str]:
    if run.status != "complete":
        yield (
            f"INCOMPLETE: this run's status is '{run.status}'; rows are missing or rest on few requests. "
            "Run the same command again to resume it."
        )
    busy = _mapping(run.busy)
    if busy.get("busy"):
        reasons = busy.get("reasons") or ()
        reasons = [reasons] if isinstance(reasons, str) else list(reasons)
        yield (
            f"BUSY MACHINE{': ' if reasons else ''}{'; '.join(reasons)}. "
            "Times and speedups cannot be trusted; counts and audits can."
        )
    if run.config.get("engine") == "simulated":
        yield "SIMULATED: no model was run; times and acceptance are scripted."
    injected = run.config.get("inject")
    if injected:
        yield f"INJECTED FAULT: '{injected}' is switched on; the audit must fail, and no number here is real."
    failed = _strategies(run, "FAIL")
    if failed:
        yield (
            f"AUDIT FAILED: {listing(failed)} did not keep the target's distribution; "
            "a speedup there is not a speedup of the same model."
        )
    lossy = _strategies(run, "LOSSY")
    if lossy:
        yield f"LOSSY: {listing(lossy)} change{'s' if len(lossy) == 1 else ''} the output by design."
    workloads = {name: _mapping(entry) for name, entry in _mapping(run.config.get("workloads")).items()}
    for name, entry in workloads.items():
        if entry.get("ignore_eos"):
            yield f"FORCED LENGTH: {name} ignores the end-of-text token, so outputs run to the token limit."
    used = {name: prompts_used(entry) for name, entry in workloads.items()}
    limited = [f"{name} {text}" for name, text in used.items() if " of " in text]
    if limited:
        yield f"LIMITED, and so wider intervals: {', '.join(limited)}."


def _strategies(run: Run, verdict: str) -> list[str]:
    return list(dict.fromkeys(audit.strategy for audit in run.audits if audit.verdict == verdict))


def _models(config: Mapping[str, Any]) -> str:
    parts = []
    for role, model in _mapping(config.get("models")).items():
        if not model:
            continue
        entry = {"name": model} if isinstance(model, str) else _mapping(model)
        where = " on ".join(str(entry[key]) for key in ("dtype", "device") if entry.get(key))
        details = [part for part in (_parameters(entry.get("parameters")), where) if part]
        parts.append(f"{role} {entry.get('name', '')}" + (f" ({', '.join(details)})" if details else ""))
    engine = config.get("engine")
    parts += [f"engine {engine}"] if engine else []
    return "; ".join(parts)


def _parameters(number: Any) -> str:
    if not isinstance(number, int | float):
        return ""
    unit, scale = next(((u, s) for u, s in (("B", 1e9), ("M", 1e6), ("k", 1e3)) if number >= s), ("", 1))
    return f"{significant(number / scale)}{unit} parameters"


def _machine(environment: Mapping[str, Any]) -> str:
    """Describe the machine as `specbench.environment` fingerprints it; leave out what it could not find."""
    hardware, system = _mapping(environment.get("hardware")), _mapping(environment.get("system"))
    cores, quota = hardware.get("cores"), hardware.get("cpu_quota")
    threads = _mapping(environment.get("torch")).get("threads")
    parts = [
        *(str(_mapping(device).get("name", device)) for device in hardware.get("accelerators") or ()),
        str(hardware.get("cpu") or ""),
        (counted(cores, "core") + (f" (quota {quota:g})" if quota else "")) if cores else "",
        counted(threads, "thread") if threads else "",
        " ".join(str(system[name]) for name in ("os", "machine") if system.get(name)),
    ]
    return ", ".join(part for part in parts if part)


def _software(environment: Mapping[str, Any]) -> str:
    versions = {
        "python": _mapping(environment.get("system")).get("python"),
        **_mapping(environment.get("versions")),
    }
    parts = [f"{name} {version}" for name, version in versions.items() if version]
    git = _mapping(environment.get("git"))
    if git.get("commit"):
        parts.append(f"commit {git['commit']}" + (" with local changes" if git.get("dirty") else ""))
    return ", ".join(parts)


def _asked(config: Mapping[str, Any]) -> Iterator[str]:
    repeats, temperatures = config.get("repeats"), config.get("temperatures")
    shared = []
    if isinstance(temperatures, Sequence) and temperatures:
        shared.append(f"temperature {listing([f'{t:g}' for t in temperatures])}")
    if isinstance(repeats, int):
        shared.append(counted(repeats, "repeat"))
    samples = config.get("samples")
    if isinstance(samples, int) and samples > 1:
        shared.append(f"{counted(samples, 'sample')} of a prompt at once")
    shared += [
        f"{setting} in every request" for setting in [listing(config.get("sampling") or ())] if setting
    ]
    workloads = []
    for name, workload in _mapping(config.get("workloads")).items():
        entry = _mapping(workload)
        limit = entry.get("max_new_tokens")
        details = [prompts_used(entry), f"up to {limit} new tokens" if limit else ""]
        known = ", ".join(detail for detail in details if detail)
        workloads.append(f"{name} ({known})" if known else str(name))
    line = "; ".join(part for part in (", ".join(shared), ", ".join(workloads)) if part)
    if line:
        yield line


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value
    return len(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
