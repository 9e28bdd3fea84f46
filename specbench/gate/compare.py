"""The gate's rules: which counts and verdicts are compared, and what counts as worse. Decided beforehand.

**What is compared.** Counts and audits. No times: they depend on the machine, so a busy machine does not
matter here. Two figures gate, tokens per target step and draft acceptance rate, in every cell that drafts,
and over all cells of a strategy together. Everything else follows from the same counts.

**Both directions fail.** A fall is a regression. A rise is reported as changed and fails too: accepting
too often is a fault that makes every figure look better. If the change was meant, store a new baseline.

**The unit is a prompt.** Rounds within a request are correlated. Requests that repeat a prompt are so too:
they share seeds under every load and temperature, and at temperature 0 they are copies. So all counts of a
prompt in a cell are added up, and over all cells of a strategy those of its cells. The test is paired by
prompt (`paired.compare_ratios`). Equal counts are reported as such: with the same seeds, machine and code
they should be equal. A change of the code that only reshuffles random numbers, or flips near-ties in low
precision, has no direction and is left to the test, so no rule has to guess whether two machines compute
alike.

**What fails.** A change that is significant at its level and larger than `TOLERANCE`. The chance that a
gate with nothing wrong fails on any count is about `ALPHA` at most: half is split evenly over the strategies'
totals, half over the cells (Bonferroni; all of it over one kind where there is only one). With fewer than
`FEW_PROMPTS` prompts the t-test is approximate, and `TOLERANCE_FEW` must be exceeded; with fewer than
`MIN_PROMPTS` nothing is tested.

**What cannot be compared** is never a pass: another model, dtype, engine, workload or limit; an unfinished
run; a missing cell or prompt; failed requests; a verdict that was PASS or LOSSY and is now INCONCLUSIVE or
absent; a strategy whose total is neither equal nor precise enough to have noticed a change of `PROMISE` in
tokens per target step. The seed, the number of repeats, the batch and the machine may differ.

**Audits.** FAIL in the run fails, whatever else is wrong. PASS that became LOSSY fails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specbench import environment
from specbench.gate.paired import PairedRatio, compare_ratios
from specbench.gate.snapshot import Audited, CellCounts, Snapshot, total
from specbench.metrics.acceptance import RoundCounts
from specbench.records import CellKey

ALPHA = 1e-3
TOLERANCE = 0.02
TOLERANCE_FEW = 0.10
FEW_PROMPTS = 20
MIN_PROMPTS = 6
PROMISE = 0.30

Metric = Literal["tokens_per_target_step", "draft_acceptance_rate"]
Outcome = Literal["same", "ok", "imprecise", "untested", "fell", "rose"]
AuditOutcome = Literal["ok", "worse", "failed", "missing", "unchecked"]
ExitCode = Literal[0, 1, 3]

RATIOS: Mapping[Metric, Callable[[RoundCounts], tuple[int, int]]] = {
    "tokens_per_target_step": lambda counts: (counts.emitted, counts.decode_rounds),
    "draft_acceptance_rate": lambda counts: (counts.accepted, counts.drafted),
}
"""What the gating figures are ratios of."""

NAMES: Mapping[Metric, str] = {
    "tokens_per_target_step": "tokens per target step",
    "draft_acceptance_rate": "draft acceptance rate",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of one cell, or of all cells of a strategy (`cell` None), run against baseline.

    `same`: equal counts, prompt by prompt. `ok`: no change found, and one of `PROMISE` would have been.
    `imprecise`: no change found, but such a change could have been missed. `untested`: too few prompts, or
    nothing counted on one side. `change` and `smallest_detectable` are relative to the baseline's figure.
    `level` is the p-value below which a change larger than `tolerance` fails.
    """

    strategy: str
    cell: CellKey | None
    metric: Metric
    baseline: float | None
    run: float | None
    change: float | None
    p_value: float | None
    level: float
    tolerance: float
    smallest_detectable: float | None
    prompts: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class AuditComparison:
    """One strategy's audit, run against baseline; None where there was none."""

    strategy: str
    baseline: Audited | None
    run: Audited | None
    outcome: AuditOutcome


@dataclass(frozen=True, slots=True)
class Gate:
    """What a gate found. `problems` are the reasons why something could not be compared; `notes` are not."""

    baseline_id: str
    run_id: str
    comparisons: tuple[Comparison, ...]
    audits: tuple[AuditComparison, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """Return what is worse or changed, audits first, each in a few words."""
        return tuple(_failures(self))

    @property
    def exit_code(self) -> ExitCode:
        """Return 1 if anything failed, else 3 if anything could not be compared, else 0."""
        return 1 if self.failures else 3 if self.problems else 0

    @property
    def conclusion(self) -> str:
        """Return one sentence: what the gate decided, and what a pass does not rule out."""
        return _conclusion(self)


def gate(baseline: Snapshot, run: Snapshot, *, alpha: float = ALPHA) -> Gate:
    """Compare a run with a baseline by the rules above.

    Args:
        baseline: a sound, complete run's (`snapshot.require_sound`).
        run: what is judged.
        alpha: the chance of a false alarm on any count.
    """
    problems = list(_unlike(baseline, run))
    comparisons: tuple[Comparison, ...] = ()
    if not problems:
        shared, missing = _shared_cells(baseline, run)
        problems += missing
        comparisons = tuple(_compare_counts(baseline, run, shared, alpha))
        problems += _imprecise(comparisons)
    audits = tuple(_compare_audits(baseline.audits, run.audits))
    problems += [
        f"the audit of {audit.strategy} was {audit.baseline.verdict} and is now {_verdict(audit.run)}"
        for audit in audits
        if audit.outcome == "missing" and audit.baseline is not None
    ]
    notes = tuple(_notes(baseline, run, comparisons, audits))
    return Gate(baseline.run_id, run.run_id, comparisons, audits, tuple(problems), notes)


# May the two be compared?


def _unlike(baseline: Snapshot, run: Snapshot) -> Iterator[str]:
    """Say what makes their counts answers to different questions."""
    if run.status != "complete":
        yield f"run {run.run_id} is {run.status}, not complete"
    if not run.cells:
        yield f"run {run.run_id} holds no cell"
    if not baseline.cells:
        yield "the baseline holds no cell"
    ours, theirs = run.config, baseline.config
    if ours.get("engine") != theirs.get("engine"):
        yield f"the engine is {ours.get('engine')}; the baseline's is {theirs.get('engine')}"
    for role in ("target", "draft"):
        yield from _unlike_models(role, _model(baseline, role), _model(run, role))
    for name, before in (theirs.get("workloads") or {}).items():
        after = (ours.get("workloads") or {}).get(name)
        if after is None:
            yield f"workload '{name}' was not run"
            continue
        for key, what in _WORKLOAD.items():
            if before.get(key) != after.get(key):
                yield (
                    f"workload '{name}' has {what} {_short(after.get(key))}; "
                    f"the baseline's has {_short(before.get(key))}"
                )


_WORKLOAD = {
    "digest": "digest",
    "prompts": "prompts",
    "max_new_tokens": "max_new_tokens",
    "ignore_eos": "ignore_eos",
}


def _model(snapshot: Snapshot, role: str) -> Mapping[str, Any] | None:
    found = (snapshot.config.get("models") or {}).get(role)
    return found if isinstance(found, Mapping) else None


def _unlike_models(
    role: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> Iterator[str]:
    if before is None or after is None:
        if before is not after:
            name = (after or before or {}).get("name")
            yield f"the {role} model {name} is in {'the run' if after else 'the baseline'} only"
        return
    for key, what in (("fingerprint", "is another model"), ("dtype", "has another dtype")):
        if before.get(key) != after.get(key):
            yield (
                f"the {role} {what}: {after.get('name')} {_short(after.get(key))}; "
                f"the baseline's is {before.get('name')} {_short(before.get(key))}"
            )


def _short(value: Any) -> str:
    return str(value)[:12]


def _shared_cells(baseline: Snapshot, run: Snapshot) -> tuple[list[CellKey], list[str]]:
    """Return the baseline's cells that the run has too, and what is wrong with the others."""
    shared, problems = [], []
    absent = [key for key in baseline.cells if key not in run.cells]
    if absent:
        others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        problems.append(f"cell '{absent[0]}'{others} of the baseline is not in the run")
    for key, before in baseline.cells.items():
        after = run.cells.get(key)
        if after is None:
            continue
        if after.failures:
            problems.append(f"{after.failures} of {after.requests} requests failed in '{key}'")
        elif before.prompts.keys() != after.prompts.keys():
            unlike = sorted(before.prompts.keys() ^ after.prompts.keys())
            problems.append(f"'{key}' has other prompts than the baseline: '{unlike[0]}' is on one side only")
        else:
            shared.append(key)
    return shared, problems


# Counts


def _compare_counts(
    baseline: Snapshot, run: Snapshot, shared: Sequence[CellKey], alpha: float
) -> Iterator[Comparison]:
    """Compare strategy by strategy: the total of those with several cells, then each cell."""
    drafting: dict[str, list[CellKey]] = defaultdict(list)
    for key in shared:
        if baseline.cells[key].pooled.drafted or run.cells[key].pooled.drafted:
            drafting[key.strategy].append(key)
    totals = [strategy for strategy, keys in drafting.items() if len(keys) > 1]
    cells = sum(len(keys) for keys in drafting.values())
    shares = 2 if totals else 1
    for strategy, keys in drafting.items():
        if strategy in totals:
            level = alpha / shares / (len(totals) * len(RATIOS))
            before, after = _by_prompt(baseline.cells, keys), _by_prompt(run.cells, keys)
            yield from _compare_figures(strategy, None, before, after, level)
        for key in keys:
            level = alpha / shares / (cells * len(RATIOS))
            before, after = _by_prompt(baseline.cells, [key]), _by_prompt(run.cells, [key])
            yield from _compare_figures(strategy, key, before, after, level)


def _by_prompt(
    cells: Mapping[CellKey, CellCounts], keys: Sequence[CellKey]
) -> dict[tuple[str, str], RoundCounts]:
    """Add up each prompt's counts over some cells."""
    parts: dict[tuple[str, str], list[RoundCounts]] = defaultdict(list)
    for key in keys:
        for prompt, counts in cells[key].prompts.items():
            parts[key.workload, prompt].append(counts)
    return {prompt: total(counts) for prompt, counts in parts.items()}


def _compare_figures(
    strategy: str,
    cell: CellKey | None,
    before: Mapping[tuple[str, str], RoundCounts],
    after: Mapping[tuple[str, str], RoundCounts],
    level: float,
) -> Iterator[Comparison]:
    for metric, ratio in RATIOS.items():
        paired = compare_ratios(
            [ratio(before[prompt]) for prompt in before], [ratio(after[prompt]) for prompt in before]
        )
        tolerance = TOLERANCE if paired.prompts >= FEW_PROMPTS else TOLERANCE_FEW
        detectable = None if paired.prompts < MIN_PROMPTS else paired.smallest_detectable(level, tolerance)
        outcome = _outcome(paired, level, tolerance)
        if outcome == "ok" and (detectable is None or detectable > PROMISE):
            outcome = "imprecise"
        yield Comparison(
            strategy=strategy,
            cell=cell,
            metric=metric,
            baseline=paired.before,
            run=paired.after,
            change=paired.change,
            p_value=paired.p_value,
            level=level,
            tolerance=tolerance,
            smallest_detectable=detectable,
            prompts=paired.prompts,
            outcome=outcome,
        )


def _outcome(paired: PairedRatio, level: float, tolerance: float) -> Outcome:
    if paired.identical:
        return "same"
    if paired.prompts < MIN_PROMPTS or paired.p_value is None:
        return "untested"
    if paired.p_value > level:
        return "ok"
    assert paired.before is not None
    assert paired.after is not None
    if abs(paired.after - paired.before) <= tolerance * paired.before:
        return "ok"
    return "rose" if paired.after > paired.before else "fell"


def headline(
    comparisons: Sequence[Comparison], metric: Metric = "tokens_per_target_step"
) -> list[Comparison]:
    """Return one figure of each strategy over all its cells."""
    found: dict[str, Comparison] = {}
    for comparison in comparisons:  # a strategy's total comes before its cells
        if comparison.metric == metric:
            found.setdefault(comparison.strategy, comparison)
    return list(found.values())


def _imprecise(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Name the strategies of which a pass would say too little."""
    for comparison in headline(comparisons):
        where = f"{comparison.strategy}: {comparison.prompts} prompts"
        if comparison.outcome == "untested":
            yield f"{where} are too few to compare; give at least {MIN_PROMPTS} (`--limit`)"
        elif comparison.outcome == "imprecise":
            noticed = _percent(comparison.smallest_detectable)
            yield f"{where} are too few: only a change of {noticed} would have been noticed (`--limit`)"
    for comparison in headline(comparisons, "draft_acceptance_rate"):
        if comparison.run is None or comparison.baseline is None:
            side = "the run" if comparison.run is None else "the baseline"
            yield f"{comparison.strategy}: {side} drafted nothing, so acceptance cannot be compared"


# Audits


def _compare_audits(baseline: Sequence[Audited], run: Sequence[Audited]) -> Iterator[AuditComparison]:
    before = {audit.strategy: audit for audit in baseline}
    after = {audit.strategy: audit for audit in run}
    for strategy in {**before, **after}:
        pair = before.get(strategy), after.get(strategy)
        yield AuditComparison(strategy, *pair, _audit_outcome(*pair))


def _audit_outcome(before: Audited | None, after: Audited | None) -> AuditOutcome:
    if after is not None and after.verdict == "FAIL":
        return "failed"
    if after is None or after.verdict == "INCONCLUSIVE":
        known = before is not None and before.verdict != "INCONCLUSIVE"
        return "missing" if known else "unchecked"
    if after.verdict == "LOSSY" and before is not None and before.verdict == "PASS":
        return "worse"
    return "ok"


def _verdict(audit: Audited | None) -> str:
    return "absent" if audit is None else audit.verdict


# In words


def _notes(
    baseline: Snapshot, run: Snapshot, comparisons: Sequence[Comparison], audits: Sequence[AuditComparison]
) -> Iterator[str]:
    if fault := run.config.get("inject"):
        yield f"fault '{fault}' was injected into this run"
    if not any(audit.run for audit in audits):
        yield "no strategy of this run was audited"
    for audit in audits:
        if audit.outcome == "unchecked" and audit.run is not None:
            yield f"the audit of {audit.strategy} is {audit.run.verdict}, as it was"
    new = [key for key in run.cells if key not in baseline.cells]
    if new:
        yield f"not in the baseline, so not compared: {len(new)} cells, the first '{new[0]}'"
    untested = [c for c in comparisons if c.outcome == "untested" and c not in headline(comparisons)]
    if untested:
        yield (
            f"{len(untested)} figures rest on fewer than {MIN_PROMPTS} prompts or on none on one side "
            "and were not tested alone"
        )
    differing = [
        f"{key} {run.config.get(key)}, was {baseline.config.get(key)}"
        for key in ("engine_options", "seed", "repeats", "rows")
        if run.config.get(key) != baseline.config.get(key)
    ]
    if differing:
        yield f"set differently: {'; '.join(differing)}"
    elsewhere = environment.comparable(dict(baseline.environment), dict(run.environment))
    if elsewhere:
        yield f"measured elsewhere or with other software: {'; '.join(elsewhere)}"
    elif comparisons and not differing and any(c.outcome != "same" for c in comparisons):
        yield (
            "some counts differ although seeds and software are the same: the decoder changed, "
            "or batches formed differently"
        )


def _failures(result: Gate) -> Iterator[str]:
    for audit in result.audits:
        if audit.outcome == "failed" and audit.run is not None:
            yield f"the audit failed {audit.strategy} ({audit.run.reason})"
        elif audit.outcome == "worse":
            yield f"{audit.strategy} was lossless and is now declared lossy"
    worst: dict[tuple[str, Metric], Comparison] = {}
    for c in result.comparisons:  # the total of a strategy first; it speaks for its cells
        if c.outcome in ("fell", "rose"):
            worst.setdefault((c.strategy, c.metric), c)
    for c in worst.values():
        where = c.strategy if c.cell is None else str(c.cell)
        verb = "fell" if c.outcome == "fell" else "changed, rose"
        yield (
            f"{where}: {NAMES[c.metric]} {verb} by {_percent(abs(c.change or 0))}, "
            f"{c.baseline:.3g} to {c.run:.3g} (p = {c.p_value:.1g})"
        )


def _conclusion(result: Gate) -> str:
    if result.failures:
        return f"FAIL: {'; '.join(result.failures)}."
    if result.problems:
        more = len(result.problems) - 1
        others = f" (and {more} more reason{'s' if more > 1 else ''})" if more else ""
        return f"NOT COMPARED: {result.problems[0]}{others}."
    passed = sum(audit.run is not None and audit.run.verdict == "PASS" for audit in result.audits)
    audited = f"{passed} of {len(result.audits)} audits pass" if result.audits else "nothing was audited"
    cells = len({c.cell for c in result.comparisons if c.cell is not None})
    changed = [c for c in headline(result.comparisons) if c.outcome != "same"]
    if not result.comparisons:
        return f"PASS: no cell drafts, so no count was compared; {audited}."
    if all(c.outcome == "same" for c in result.comparisons):
        return f"PASS: the counts of all {cells} cells that draft are the baseline's; {audited}."
    weakest = max(changed, key=lambda c: c.smallest_detectable or 0, default=None)
    power = (
        f"; a change of {_percent(weakest.smallest_detectable)} in tokens per target step of "
        f"{weakest.strategy} would have been noticed, a smaller one perhaps not"
        if weakest is not None and weakest.smallest_detectable is not None
        else ""
    )
    return f"PASS: no count of {cells} cells changed beyond sampling error{power}; {audited}."


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.2g} %"
