"""Carrying out a run: load, warm up, measure unit by unit, audit, summarise, store.

The only place where engines, workloads, records and the run folder meet. Everything is written as it is
measured; a run that stops half-way continues where it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench import environment, registry, workloads
from specbench.audit.verdicts import summed_up
from specbench.bench import config as configuration
from specbench.bench.audit import AuditConfig, audits, continuation_sampling
from specbench.bench.config import AGAIN, BASELINE, RunConfig
from specbench.bench.loading import (
    Models,
    Progress,
    alteration,
    check_writable,
    encoder,
    load_models,
    local_engine,
)
from specbench.bench.matrix import Encoded, Unit, request_sampling, schedule, units
from specbench.bench.sampling import parse_sampling
from specbench.bench.store import Run, RunStore
from specbench.errors import UsageError, WorkloadError
from specbench.metrics import identities, summarise
from specbench.records import (
    CellKey,
    CellRecords,
    Request,
    RequestRecord,
    RoundRecord,
    SamplingParams,
    Schedule,
    Serving,
    StepRecord,
)
from specbench.runtime.events import Finished, Stepped
from specbench.workloads import Load, Workload

if TYPE_CHECKING:
    from specbench.engines.base import Engine
    from specbench.models import LoadedModel
    from specbench.runtime.grammar import GrammarCompiler

MARGIN = 64
"""Slots beyond the longest prompt with its output: room for the longest draft."""
AUDIT_ROWS = 128
WARM_UP_TOKENS = 8


def run(config: RunConfig, results: Path, progress: Progress, *, run_id: str | None, fresh: bool) -> Run:
    """Carry out a run, or continue the latest unfinished one with the same configuration.

    Raises:
        UsageError: something asked for does not exist or does not fit; nothing was measured.
        NotMeasured: the records contradict themselves.
    """
    _require_places(config)
    chosen = [_shaped(workload, config) for workload in _asked_for(config)]
    check_writable(results)
    models = load_models(config, config.dtype, progress)
    prompts = {w.name: _encode(w, models.target) for w in chosen}
    _check_parameters(config, models.target, prompts)
    engine = _engine(config, models, prompts)
    for arm in config.arms:
        engine.open(_strategy_of(arm))  # one that does not fit is refused before there is a run folder
    store, resumed = _open_store(config, results, chosen, models, run_id, fresh)
    progress.say(f"{'resuming' if resumed else 'run'} {store.folder}")

    monitor = environment.LoadMonitor()
    monitor.start()
    try:
        _measure(config, chosen, prompts, models, engine, store, progress, monitor)
        _summarise(store)
        _note_load(store, monitor)
        engine.close()
        if config.audit and engine.capabilities.can_audit:
            _audit(config, models, store, progress)
        store.finish()
    except BaseException:
        engine.close()
        if store.document.status == "running":
            _note_load(store, monitor)
            store.update(status="interrupted")
        raise
    return store.document


def _note_load(store: RunStore, monitor: environment.LoadMonitor) -> None:
    """Store how quiet the machine was; once part of a run was measured on a busy one, it stays so."""
    report, earlier = asdict(monitor.report()), store.document.busy
    store.update(busy=earlier if earlier and earlier.get("busy") else report)


# Before anything is measured


def _require_places(config: RunConfig) -> None:
    """Refuse an unknown dtype, or a device this machine lacks, before anything is loaded or downloaded."""
    from specbench import models

    models.require_dtype(config.dtype)
    models.require_dtype(config.audit_dtype, "--audit-dtype")
    if registry.parse(config.engine).name != "simulated":
        models.require_device(config.device)
        if config.draft_device is not None:
            models.require_device(config.draft_device, "--draft-device")


def _asked_for(config: RunConfig) -> list[Workload]:
    """Load the workloads; those that ask for it come once more without grammars, unless one is asked for."""
    loaded = workloads.load_many(config.workloads)
    return loaded if "grammar" in parse_sampling(config.sampling) else workloads.with_twins(loaded)


def _shaped(workload: Workload, config: RunConfig) -> Workload:
    """Apply what was asked for to a workload's own settings."""
    limit = config.limit
    if limit is None and config.quick:
        limit = configuration.quick_limit(workload.name)
    if limit is not None:
        workload = workload.limited(limit)
    if not workload.prompts:
        raise WorkloadError(f"workload '{workload.name}' has no prompt left", hint="raise --limit")
    loads = config.loads or (configuration.quick_loads(workload.name) if config.quick else None)
    if loads:
        workload = replace(workload, loads=tuple(Load.parse(text) for text in loads))
    for load in workload.loads:
        if load.utilisation is not None and all(other.kind != "closed" for other in workload.loads):
            raise UsageError(
                f"load {load.label} of '{workload.name}' is a share of the measured closed-loop throughput, "
                "but no closed load is run",
                hint="add a load like c=8, or give an absolute rate as rate=2/s",
            )
    if config.temperatures is not None:
        workload = replace(workload, temperatures=config.temperatures)
    tokens = config.max_new_tokens or (configuration.QUICK_TOKENS if config.quick else None)
    if tokens is not None:
        workload = replace(workload, max_new_tokens=min(tokens, workload.max_new_tokens))
    return workload


def _encode(workload: Workload, target: LoadedModel | None) -> list[Encoded]:
    """Render every prompt to token ids, once."""
    encoded = []
    for prompt in workload.prompts:
        if target is None:
            text = prompt.text or "".join(message["content"] for message in prompt.messages or ())
            tokens = list(text.encode())
        else:
            tokens = prompt.render(target.tokenizer)
        most = min(prompt.max_new_tokens or workload.max_new_tokens, workload.max_new_tokens)
        if not tokens:
            raise WorkloadError(f"prompt '{prompt.id}' of '{workload.name}' is empty once tokenised")
        if target is not None and target.max_context is not None and len(tokens) >= target.max_context:
            raise WorkloadError(
                f"prompt '{prompt.id}' of '{workload.name}' has {len(tokens)} tokens; "
                f"the context of {target.name} is {target.max_context}",
                hint="take it out of the prompt file, or use a model with a longer context",
            )
        encoded.append(Encoded(prompt.id, tuple(tokens), most, prompt.grammar))
    if target is not None:
        _check_grammars(workload, target)
    return encoded


def _check_grammars(workload: Workload, target: LoadedModel) -> None:
    """Refuse grammars that this model's tokenizer cannot satisfy, before anything is measured."""
    constrained = [(prompt.id, prompt.grammar) for prompt in workload.prompts if prompt.grammar is not None]
    if not constrained:
        return
    compiler = _compiler(target)
    for name, grammar in constrained:
        try:
            compiler.matcher(grammar)
        except UsageError as error:
            raise WorkloadError(
                f"prompt '{name}' of '{workload.name}': {error.message}", hint=error.hint
            ) from None


def _check_parameters(
    config: RunConfig, target: LoadedModel | None, prompts: Mapping[str, list[Encoded]]
) -> None:
    """Refuse parameters that contradict a prompt's grammar or do not fit the model, before a run begins."""
    asked = parse_sampling(config.sampling)
    encode = encoder(target)
    named: set[int] = set()
    for listed in prompts.values():
        for prompt in listed:
            named.update(request_sampling(prompt, asked, encode).named_tokens)
    if target is None:
        return
    for token in sorted(named):
        if token >= target.vocab_size:
            raise UsageError(
                f"--sampling names token {token}; {target.name} has {target.vocab_size} tokens",
                hint="ids are those of the target's tokenizer, from 0",
            )
    if "grammar" in asked:
        _compiler(target).matcher(asked["grammar"])


def _compiler(target: LoadedModel) -> GrammarCompiler:
    from specbench.runtime.grammar import GrammarCompiler

    return GrammarCompiler(target.tokenizer, vocab_size=target.vocab_size, eos_ids=target.eos_token_ids)


def _open_store(
    config: RunConfig, results: Path, chosen: list[Workload], models: Models, run_id: str | None, fresh: bool
) -> tuple[RunStore, bool]:
    """Create a run folder, or open the latest unfinished one with the same configuration."""
    described = describe(config, chosen, models)
    around = environment.fingerprint(models.loaded)
    if not fresh and run_id is None:
        for folder in sorted(results.glob(f"*-{config.digest}"), reverse=True):
            try:
                found = RunStore.open(folder).document
            except UsageError:
                continue
            if found.status != "complete" and _continues(found, described, around, models):
                return RunStore.create(folder, described, around), True
    name = run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{config.digest}"
    folder = results / name
    if fresh and (folder / "run.json").exists():
        raise UsageError(
            f"{folder} exists", hint="choose another --run-id, or leave out --fresh to resume it"
        )
    resumed = (folder / "run.json").exists()
    return RunStore.create(folder, described, around), resumed


def _continues(found: Run, described: dict[str, Any], around: dict[str, Any], models: Models) -> bool:
    """Whether a stored run asked the same question, of the same software on the same machine."""
    if found.config != json.loads(json.dumps(described)):
        return False
    if models.target is None:
        return True  # a simulation depends on nothing around it
    versions = [found.environment.get("versions", {}), around["versions"]]
    same = all(versions[0].get(name) == versions[1].get(name) for name in ("specbench", "transformers"))
    return same and not environment.comparable(found.environment, around)


def describe(config: RunConfig, chosen: list[Workload], models: Models) -> dict[str, Any]:
    """Return the configuration as it is stored: what was asked for, and what it came to."""
    spec = registry.parse(config.engine)

    def model(loaded: LoadedModel | None) -> dict[str, Any] | None:
        if loaded is None:
            return None
        return {
            "name": loaded.name,
            "dtype": loaded.dtype,
            "device": loaded.device,
            "parameters": loaded.parameters,
            "weight_bytes": loaded.weight_bytes,
            "fingerprint": loaded.fingerprint,
        }

    return {
        "models": {"target": model(models.target), "draft": model(models.draft)},
        "engine": spec.name,
        "engine_options": dict(spec.options),
        "strategies": list(config.arms),
        "temperatures": sorted({t for w in chosen for t in w.temperatures}),
        "repeats": config.repeats,
        "rows": config.rows,
        "seed": config.seed,
        "sampling": list(config.sampling),
        "samples": config.samples,
        "quick": config.quick,
        "inject": config.inject,
        "audit": {"dtype": config.audit_dtype, "budget": config.audit_budget} if config.audit else None,
        "workloads": {
            w.name: {
                "headline": w.headline,
                "prompts": len(w.prompts),
                "available": w.available,
                "loads": [load.label for load in w.loads],
                "temperatures": list(w.temperatures),
                "max_new_tokens": w.max_new_tokens,
                "digest": w.digest,
                **({"twin_of": w.twin_of} if w.twin_of else {}),
            }
            for w in chosen
        },
    }


def _engine(config: RunConfig, models: Models, prompts: Mapping[str, list[Encoded]]) -> Engine:
    spec = registry.parse(config.engine)
    options = registry.options("engine", spec)
    if spec.name == "simulated":
        from specbench.engines.simulated import SimulatedEngine

        return SimulatedEngine(options)
    if spec.name != "local":
        raise UsageError(f"engine '{spec.name}' cannot be run yet", hint="use local or simulated")
    assert models.target is not None
    longest = max(len(p.tokens) + p.max_new_tokens for listed in prompts.values() for p in listed)
    return local_engine(models, rows=config.rows, width=longest + MARGIN)


# Measuring


def _measure(
    config: RunConfig,
    chosen: list[Workload],
    prompts: dict[str, list[Encoded]],
    models: Models,
    engine: Engine,
    store: RunStore,
    progress: Progress,
    monitor: environment.LoadMonitor,
) -> None:
    arms = config.arms
    alter = alteration(config.inject)
    work = list(units(chosen, prompts, config.repeats))
    asked = parse_sampling(config.sampling)
    encode = encoder(models.target)
    requests = sum(len(unit.prompts) for unit in work) * config.samples
    progress.stage("measuring", total=requests * len(arms))
    warm: set[str] = set()
    for position, unit in enumerate(work):
        rate = unit.load.rate or _rate(unit, store, config.samples)
        shift = position % len(arms)
        for arm in (*arms[shift:], *arms[:shift]):
            key = CellKey(unit.workload, unit.temperature, unit.load.label, arm)
            label = f"{unit.workload} T={unit.temperature:g} {unit.load.label} {arm}"
            if store.has(key, unit.repeat, unit.number):
                progress.advance(len(unit.prompts) * config.samples, label)
                continue
            engine.open(_strategy_of(arm), alter=alter)
            if arm not in warm:
                _warm_up(engine, unit)
                warm.add(arm)
            offered = schedule(
                unit,
                seed=config.seed,
                rate=rate,
                again=arm == AGAIN,
                asked=asked,
                encode=encode,
                samples=config.samples,
            )
            progress.advance(0, label)
            serving = _serve(engine, key, unit, offered, progress)
            identities.enforce(CellRecords(key, (serving,)))
            store.write_serving(serving)
            store.update(memory={str(key): engine.memory()})
            monitor.sample()


def _strategy_of(arm: str) -> str:
    return arm.partition("#")[0]


def _warm_up(engine: Engine, unit: Unit) -> None:
    """Decode a little and throw it away, so that no strategy pays for being first."""
    first = unit.prompts[0]
    params = SamplingParams(temperature=1.0, max_new_tokens=min(WARM_UP_TOKENS, max(2, first.max_new_tokens)))
    request = Request(0, first.tokens, params, first.id)
    for _ in engine.serve(Schedule((request,), concurrency=1)):
        pass


def _serve(engine: Engine, key: CellKey, unit: Unit, offered: Schedule, progress: Progress) -> Serving:
    steps: list[StepRecord] = []
    rounds: list[RoundRecord] = []
    requests: list[RequestRecord] = []
    finished = 0.0
    for event in engine.serve(offered):
        if isinstance(event, Finished):
            requests.append(event.record)
            finished = max(finished, event.record.finished)
            progress.advance(1)
        elif isinstance(event, Stepped):
            steps.append(event.step)
            rounds.extend(event.rounds)
    return Serving(key, unit.repeat, unit.number, tuple(steps), tuple(rounds), tuple(requests), finished)


def _rate(unit: Unit, store: RunStore, samples: int) -> float | None:
    """Return prompts per second for a share of the closed-loop throughput of ordinary decoding."""
    if unit.load.utilisation is None:
        return None
    best = 0.0
    for cell in store.cells():
        key = cell.key
        same = (key.workload, key.temperature, key.strategy) == (unit.workload, unit.temperature, BASELINE)
        if same and key.load.startswith("c="):
            requests = sum(len(s.requests) for s in cell.servings)
            best = max(best, requests / sum(s.duration_s for s in cell.servings))
    assert best, "closed loads are measured first, and `_shaped` has seen to it that there is one"
    return best / samples * unit.load.utilisation


# Judging


def _summarise(store: RunStore) -> None:
    """Derive every figure from the stored records, and check that they do not contradict themselves."""
    cells = store.cells()
    baselines = {
        (c.key.workload, c.key.temperature, c.key.load): c for c in cells if c.key.strategy == BASELINE
    }
    summaries = []
    for cell in cells:
        identities.enforce(cell)
        key = cell.key
        summaries.append(summarise(cell, baselines.get((key.workload, key.temperature, key.load))))
    store.update(cells=summaries)


def _audit(config: RunConfig, models: Models, store: RunStore, progress: Progress) -> None:
    """Audit every strategy, in float32 by default: by all tests, or by whole continuations alone."""
    assert models.target is not None
    strategies = tuple(arm for arm in config.arms if arm != AGAIN)
    if all(name in {verdict.strategy for verdict in store.document.audits} for name in strategies):
        return
    exact = models
    if config.audit_dtype != models.target.dtype:
        exact = load_models(config, config.audit_dtype, progress)
    if config.audit_budget is None:
        _check_continuations(config, exact, strategies, store, progress)
    else:
        _audit_fully(config, exact, strategies, store, progress)


def _audit_fully(
    config: RunConfig, exact: Models, strategies: tuple[str, ...], store: RunStore, progress: Progress
) -> None:
    assert config.audit_budget is not None
    asked = AuditConfig(
        config.target,
        config.draft,
        dtype=config.audit_dtype,
        strategies=strategies,
        budget=config.audit_budget,
        sampling=config.sampling,
        seed=config.seed,
        inject=config.inject,
    )
    done = {record.strategy: record for record in store.document.evidence}
    for record in audits(asked, exact, progress, done=done):
        done[record.strategy] = record
        listed = [done[name] for name in strategies if name in done]
        store.update(evidence=listed, audits=[summed_up(entry) for entry in listed])


def _check_continuations(
    config: RunConfig, exact: Models, strategies: tuple[str, ...], store: RunStore, progress: Progress
) -> None:
    """Check every strategy's continuations against the target's exact law."""
    from specbench.audit import continuations
    from specbench.audit.reference import Oracle

    assert exact.target is not None
    target = exact.target
    done = {verdict.strategy: verdict for verdict in store.document.audits}
    prompts = continuations.branch_prompts(target.tokenizer)
    engine = local_engine(exact, rows=AUDIT_ROWS, width=max(map(len, prompts)) + MARGIN)
    sampling = continuation_sampling(parse_sampling(config.sampling), encoder(target))

    def oracle_for(horizon: int) -> Oracle:
        return Oracle(target.model, sampling(horizon, 0), target.eos_token_ids)

    def on_plan(strategy: str, plan: continuations.Plan) -> None:
        progress.stage(f"chi-squared: {strategy}, {sum(plan.draws)} draws", total=sum(plan.draws))

    progress.stage("chi-squared: the exact law")
    try:
        for verdict in continuations.check(
            engine,
            oracle_for,
            sampling,
            [name for name in strategies if name not in done],
            prompts,
            alpha=continuations.RUN_ALPHA / len(strategies),
            seed=config.seed + 1,
            dtype=target.dtype,
            alter=alteration(config.inject),
            injected=config.inject,
            on_plan=on_plan,
            progress=progress.advance,
        ):
            done[verdict.strategy] = verdict
            store.update(audits=[done[name] for name in strategies if name in done])
    finally:
        engine.close()


def outcome(document: Run) -> int:
    """Return the exit code of a finished run: 1 if a lossless strategy was caught, else 0."""
    return 1 if any(verdict.verdict == "FAIL" for verdict in document.audits) else 0
