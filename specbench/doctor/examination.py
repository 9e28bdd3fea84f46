"""The order of the examination: what is installed, the models, the machine's rates, then what these allow."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench import models
from specbench.doctor import bounds as allowed
from specbench.doctor import installed, machine, pair
from specbench.doctor.findings import Finding, Status, worst
from specbench.doctor.measure import Effort, Measured, measure
from specbench.environment import SHORTEST_INTERVAL, BusyReport, LoadMonitor, fingerprint
from specbench.errors import UsageError

if TYPE_CHECKING:
    from specbench.models import ResolvedModel

_MEASURED_DTYPES = ("float32", "bfloat16")


@dataclass(slots=True)
class Diagnosis:
    """Everything found: the findings in reading order, and the numbers behind them."""

    device: str
    findings: list[Finding] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    engines: list[installed.EngineState] = field(default_factory=list)
    aliases: list[installed.ModelState] = field(default_factory=list)
    free_memory_bytes: int | None = None
    busy: BusyReport | None = None
    measured: Measured | None = None
    target: pair.ModelFacts | None = None
    draft: pair.ModelFacts | None = None
    vocabulary_fits: bool | None = None
    bounds: allowed.Bounds | None = None

    @property
    def outcome(self) -> Status:
        """The worst status found."""
        return worst(self.findings)


def diagnose(
    target: str | None = None,
    draft: str | None = None,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    results: Path = Path("results"),
    effort: Effort | None = None,
    monitor: LoadMonitor | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Examine this machine, and two models if they are named.

    Args:
        target: a model as `specbench run --target` takes it.
        draft: the same; only with a target.
        dtype: what they are loaded in; None for what `specbench run` would take.
        device: where they are loaded and what is measured.
        results: where runs would be written.
        effort: how long to measure.
        monitor: notices other work; replaced in tests.
        tell: is given a line before whatever takes seconds.

    Raises:
        UsageError: an argument names nothing; what is found wrong is a finding instead.
    """
    if dtype is not None:
        models.require_dtype(dtype)
    if draft is not None and target is None:
        raise UsageError("--draft needs a target", hint="add --target MODEL")
    found = Diagnosis(device)
    torch_problem = _torch_problem()
    named: dict[str, ResolvedModel] = {}
    if torch_problem is None:
        models.require_device(device)
        named = _resolve(target, draft)

    stated = installed.stated_requirements()
    parts = fingerprint()  # after torch is loaded, so that its part is there
    found.environment = {name: parts[name] for name in ("system", "hardware", "versions", "torch")}
    found.findings += [_versions(found.environment), *installed.check_requirements(stated)]
    if torch_problem is not None:
        found.findings.append(torch_problem)
    found.aliases, found.engines = installed.model_states(), installed.engine_states()
    about_models: list[Finding] = []
    if torch_problem is None:
        found.free_memory_bytes = machine.free_memory(device)
        # As `specbench run` chooses: on CPU the bundled model is twice as fast in bfloat16.
        chosen = dtype or ("bfloat16" if target == "smollm2" else "auto")
        about_models = _examine_models(found, named, chosen, tell)
        _examine_machine(found, effort or Effort(), monitor or LoadMonitor(), tell)
        found.findings.append(machine.memory_finding(found.free_memory_bytes, device))
    found.findings += [
        machine.disk_finding("results", machine.space(results), "--output"),
        machine.disk_finding("cache", machine.space(_cache_folder()), "SPECBENCH_CACHE"),
        installed.models_finding(found.aliases),
        installed.engines_finding(found.engines),
    ]
    found.findings += about_models
    if found.target is not None and (draft is None or found.vocabulary_fits):
        _bound(found, found.target)
    return found


def _torch_problem() -> Finding | None:
    """Return what keeps torch from being imported: the one failure a doctor must survive."""
    try:
        import torch  # noqa: F401
    except Exception as error:  # noqa: BLE001 - a broken installation fails in any way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Finding("torch", "problem", f"torch cannot be imported: {reason}", "reinstall torch")
    return None


def _resolve(target: str | None, draft: str | None) -> dict[str, ResolvedModel]:
    return {
        role: models.resolve(name)
        for role, name in (("target", target), ("draft", draft))
        if name is not None
    }


def _cache_folder() -> Path:
    from specbench.models import smollm2

    return smollm2.cache_folder()


def _versions(environment: dict[str, Any]) -> Finding:
    system, versions = environment["system"], environment["versions"]
    words = [f"python {system['python']}"]
    shown = ("specbench", "torch", "transformers", "llguidance")
    words += [f"{name} {versions[name] or '–'}" for name in shown]
    return Finding("versions", "ok", ", ".join(words))


def _examine_models(
    found: Diagnosis, named: dict[str, ResolvedModel], dtype: str, tell: Callable[[str], None]
) -> list[Finding]:
    """Load and try the named models; what is learnt of them goes into `found`, the findings are returned."""
    findings, loaded = [], {}
    for role, model in named.items():
        tell(f"loading {model.name}")
        too_large = pair.memory_problem(role, model, dtype, machine.free_memory(found.device))
        if too_large is not None:
            findings.append(too_large)
            continue
        network, facts, finding = pair.examine(role, model, dtype, found.device)
        findings.append(finding)
        if network is not None:
            loaded[role] = network
        if role == "target":
            found.target = facts
        else:
            found.draft = facts
    if len(loaded) == 2:
        findings.append(pair.vocabulary_finding(loaded["target"], loaded["draft"]))
        found.vocabulary_fits = findings[-1].status == "ok"
    return findings


def _examine_machine(
    found: Diagnosis, effort: Effort, monitor: LoadMonitor, tell: Callable[[str], None]
) -> None:
    """Measure the device while watching what else the machine does."""
    import torch

    dtypes = list(_MEASURED_DTYPES)
    if found.target is not None and found.target.dtype not in dtypes:
        dtypes.append(found.target.dtype)
    tell("measuring memory bandwidth and matrix products, a few seconds")
    monitor.start()
    found.measured = measure(found.device, dtypes, effort, monitor.sample)
    if effort == Effort() and found.measured.seconds < SHORTEST_INTERVAL:
        time.sleep(SHORTEST_INTERVAL - found.measured.seconds)  # below that the monitor cannot tell
    found.busy = monitor.report()
    hardware = found.environment["hardware"]
    found.findings += [
        machine.device_finding(found.device, found.environment),
        machine.threads_finding(
            torch.get_num_threads(), hardware["cores"], hardware["cpu_quota"], found.busy
        ),
        machine.quiet_finding(found.busy),
        *machine.rate_findings(found.measured),
    ]


def _bound(found: Diagnosis, target: pair.ModelFacts) -> None:
    """Derive what the rates allow: the highest ones, since on a busy machine a median is no bound."""
    measured = found.measured
    assert measured is not None
    bandwidth = measured.read.highest
    steps = []
    for facts in (target, found.draft):
        if facts is None:
            continue
        if facts.weights_read is None:
            message = f"none: {facts.name} is a mixture of experts, and a step reads only some of its weights"
            found.findings.append(Finding("bound", "warning", message, "measure it with `specbench run`"))
            return
        steps.append(
            allowed.step_bound(
                facts.name, facts.weights_read, facts.kv_read, bandwidth, context=facts.context
            )
        )
    rate = measured.matmul.get(target.dtype)
    ridge = None
    if rate is not None:
        ridge = allowed.ridge_tokens(target.bytes_per_weight, rate.highest, bandwidth)
    found.bounds = allowed.bounds(steps[0], steps[1] if len(steps) == 2 else None, ridge)
    ratio = found.bounds.cost_ratio
    if ratio >= 1:
        message = f"a step of the draft reads {ratio:.2f} times the bytes of the target's: it cannot pay"
        found.findings.append(
            Finding("bound", "warning", message, "use a smaller draft, or --strategy ngram")
        )
