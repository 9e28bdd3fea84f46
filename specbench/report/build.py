"""Which tables a run becomes: one per workload and load, then the audit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from specbench.audit.verdicts import ChiSquaredVerdict
from specbench.metrics.definitions import DEFINITIONS
from specbench.metrics.summary import CellSummary, Distribution
from specbench.report.audit import audit_table
from specbench.report.conclusions import conclusions, footnotes, marks_of
from specbench.report.context import banners, context, prompts_used, workload_config
from specbench.report.headline import Headline, headline_of
from specbench.report.table import Cell, Column, Report, Table, Tone
from specbench.report.wording import (
    DASH,
    counted,
    distribution,
    fixed,
    interval,
    is_again,
    milliseconds,
    monte_carlo,
    shares,
    significant,
    sizes,
    strategy_label,
)

if TYPE_CHECKING:
    from specbench.bench.store import Run

LEGEND = (
    "Times in ms: draft, verify and commit are means per step, pairs are median/95th percentile. "
    "–: not measured.",
    "tokens/step: tokens per target step, every step counted. acc. length: acceptance length, which leaves "
    "out steps without a draft. draft acc. rate: draft acceptance rate, accepted / drafted. All pooled.",
    "cost ratio: round cost ratio, a step / an ordinary step in time; speculation wins where tokens/step "
    "exceed break-even. pred. speedup: tokens/step over what a step would cost if verifying were as cheap as "
    "an ordinary step; what is measured below it is lost to verifying and overhead.",
    "KV overhead: draft weights + draft KV + lookahead KV of the target, at their peak.",
)
DISPATCH = (
    "dispatch: how the kernels of a step were started: eager one by one, compiled from compiled code, graph "
    "by replaying a CUDA graph, capture while recording one."
)


def build(run: Run) -> Report:
    """Arrange a run for reading."""
    groups: dict[tuple[str, str], list[CellSummary]] = {}
    for cell in run.cells:
        groups.setdefault((cell.key.workload, cell.key.load), []).append(cell)
    tables = [_workload_table(run, name, load, cells) for (name, load), cells in groups.items()]
    if run.evidence:
        tables.append(audit_table(run.evidence))
    elif run.audits:
        tables.append(_audit_table(run.audits))
    legend = [*LEGEND, *([DISPATCH] if _shows_dispatch(run) else [])] if groups else []
    return Report(
        title=f"specbench run {run.run_id}" + (f", {run.created}" if run.created else ""),
        banners=banners(run),
        heading="Against ordinary decoding:" if run.cells else "",
        conclusions=tuple(conclusions(run)) or ("Nothing has been measured yet.",),
        footnotes=footnotes(run),
        tables=tuple(tables),
        legend=(*legend, *(f"note: {note}" for note in run.notes)),
        context=context(run),
    )


def _shows_dispatch(run: Run) -> bool:
    """Whether there is something to tell: some step was not started kernel by kernel."""
    return any(set(cell.dispatch) - {"eager"} for cell in run.cells)


def row_order(cells: Iterable[CellSummary]) -> list[CellSummary]:
    """Order cells by temperature; within one the baseline, its A/A row, then the rest as they came."""
    return sorted(cells, key=lambda c: (c.key.temperature, not c.is_baseline, not is_again(c.key.strategy)))


def _workload_table(run: Run, name: str, load: str, cells: Sequence[CellSummary]) -> Table:
    config = workload_config(run, name)
    headline = headline_of(config)
    ordered = row_order(cells)
    breaks = {i for i, c in enumerate(ordered) if i and c.key.temperature != ordered[i - 1].key.temperature}
    failed = {a.strategy for a in run.audits if a.verdict == "FAIL"}
    lossy = {a.strategy for a in run.audits if a.verdict == "LOSSY"}
    marks = dict.fromkeys(lossy, "lossy") | dict.fromkeys(failed, "audit FAIL")
    details = [f"load {load}", prompts_used(config)]
    repeats = run.config.get("repeats")
    if isinstance(repeats, int):
        details.append(counted(repeats, "repeat"))
    shown = _shows_dispatch(run)
    return Table(
        title=f"{name}: {', '.join(detail for detail in details if detail)}",
        columns=_columns(headline, shown),
        rows=tuple(_row(cell, headline, marks.get(cell.key.strategy), shown) for cell in ordered),
        num_keys=2,
        notes=(headline.explanation, *marks_of(ordered, headline), *_failures(ordered)),
        breaks=frozenset(breaks),
    )


def _columns(headline: Headline, shows_dispatch: bool) -> tuple[Column, ...]:
    overhead = "KV overhead: draft weights + draft KV + lookahead KV"
    return (
        Column("strategy", "strategy", "strategy", align="left"),
        Column("temperature", "T", "T"),
        _metric(headline.field, headline.header, "speedup"),
        _metric("predicted_speedup", "pred.\nspeedup", "speedup"),
        _metric("tokens_per_target_step", "tokens\n/step", "speedup"),
        _metric("break_even_tokens_per_step", "break-\neven", "speedup"),
        _metric("draft_acceptance_rate", "draft\nacc.\nrate", "speedup"),
        _metric("acceptance_length", "acc.\nlength", "step"),
        _metric("draft_s", "draft", "step", "ms"),
        _metric("verify_s", "verify", "step", "ms"),
        _metric("commit_s", "commit", "step", "ms"),
        _metric("round_cost_ratio", "cost\nratio", "step"),
        Column("lookahead_kv", "KV overhead:\nweights +\ndraft + lookahead", overhead, group="memory"),
        *([_metric("dispatch", "dispatch", "memory")] if shows_dispatch else ()),
        _metric("ttft", "TTFT", "client", "ms"),
        _metric("itl", "ITL", "client", "ms"),
        _metric("tokens_per_chunk", "tok/\nchunk", "client"),
        _metric("tpot", "TPOT", "client", "ms"),
        _metric("e2e", "E2E", "client", "ms"),
        _metric("output_throughput", "output", "client", "tok/s"),
    )


def _metric(name: str, header: str, group: str, unit: str = "") -> Column:
    return Column(name, header, DEFINITIONS[name].label, unit, group)


def _row(cell: CellSummary, headline: Headline, mark: str | None, shows_dispatch: bool) -> tuple[Cell, ...]:
    estimate = headline.of(cell)
    tone: Tone = "plain"
    if estimate and estimate.low is not None and estimate.high is not None:
        tone = "good" if estimate.low > 1 else "bad" if estimate.high < 1 else "doubtful"
    speedup = Cell(interval(estimate), estimate.value if estimate else None, tone)
    if cell.is_baseline:
        speedup = Cell("1", 1.0)  # by definition
    overhead = (cell.draft_weights, cell.draft_kv, cell.lookahead_kv)
    label = strategy_label(cell) + (f" ({mark})" if mark else "")
    return (
        Cell(label, tone="bad" if mark else "plain"),
        Cell(f"{cell.key.temperature:g}", cell.key.temperature),
        speedup,
        _number(cell.predicted_speedup),
        _number(cell.tokens_per_target_step),
        _number(cell.break_even_tokens_per_step),
        _number(cell.draft_acceptance_rate),
        _number(cell.acceptance_length),
        _time(cell.draft_s),
        _time(cell.verify_s),
        _time(cell.commit_s),
        _number(cell.round_cost_ratio),
        Cell(sizes(overhead), None if None in overhead else sum(part or 0 for part in overhead)),
        *([Cell(shares(cell.dispatch))] if shows_dispatch else ()),
        _distribution(cell.ttft),
        _distribution(cell.itl),
        _number(cell.tokens_per_chunk),
        _distribution(cell.tpot),
        _distribution(cell.e2e),
        Cell(significant(cell.output_throughput), cell.output_throughput),
    )


def _number(value: float | None) -> Cell:
    return Cell(fixed(value), value)


def _time(seconds: float | None) -> Cell:
    return Cell(milliseconds(seconds), seconds)


def _distribution(times: Distribution | None) -> Cell:
    return Cell(distribution(times), times.p50 if times else None)


def _failures(cells: Sequence[CellSummary]) -> list[str]:
    return [
        f"{strategy_label(cell)}, T={cell.key.temperature:g}: {cell.failures} of "
        f"{counted(cell.requests, 'request')} failed"
        for cell in cells
        if cell.failures
    ]


def _audit_table(audits: Sequence[ChiSquaredVerdict]) -> Table:
    columns = (
        Column("strategy", "strategy", "strategy", align="left"),
        Column("verdict", "verdict", "verdict", align="left"),
        Column("draws", "draws", "draws", group="test"),
        Column("df", "df", "df", group="test"),
        Column("statistic", "X²", "X²", group="test"),
        Column("p_value", "p", "p", group="test"),
        Column("tv_upper", "TV upper\nbound", "TV upper bound", group="test"),
        Column("smallest_detectable_tv", "smallest\ndetectable TV", "smallest detectable TV", group="test"),
        Column("drafted", "drafted", "drafted", group="proof"),
        Column("accepted", "accepted", "accepted", group="proof"),
        Column("rejections", "rejections", "rejections", group="proof"),
        Column("dtype", "dtype", "dtype", group="setting", align="left"),
        Column("top_k", "top_k", "top_k", group="setting"),
        Column("temperature", "T", "T", group="setting"),
        Column("horizon", "horizon", "horizon", "tokens", group="setting"),
    )
    alphas = sorted({audit.alpha for audit in audits})
    notes = [
        "Chi-squared test of whole continuations against the target's exact distribution; FAIL below "
        f"p = {' or '.join(f'{alpha:.2g}' for alpha in alphas)}. TV upper bound: 99 %, of the pooled table.",
        *(f"{a.strategy}: {a.verdict}: {a.reason}" for a in audits if a.verdict != "PASS" and a.reason),
        *(f"{a.strategy}: fault '{a.injected}' was injected" for a in audits if a.injected),
        *(
            f"{a.strategy}: {counted(a.out_of_support, 'token')} the target cannot produce"
            for a in audits
            if a.out_of_support
        ),
    ]
    return Table(
        title="audit: is it still the target's distribution?",
        columns=columns,
        rows=tuple(_audit_row(audit) for audit in audits),
        num_keys=2,
        notes=tuple(notes),
    )


def _audit_row(audit: ChiSquaredVerdict) -> tuple[Cell, ...]:
    tones: dict[str, Tone] = {"PASS": "good", "FAIL": "bad"}
    return (
        Cell(audit.strategy),
        Cell(audit.verdict, tone=tones.get(audit.verdict, "doubtful")),
        _count(audit.draws),
        _count(audit.df),
        Cell(fixed(audit.statistic, 1), audit.statistic),
        Cell(monte_carlo(audit.p_value, audit.alpha), audit.p_value),
        Cell(fixed(audit.tv_upper, 3), audit.tv_upper),
        Cell(fixed(audit.smallest_detectable_tv, 3), audit.smallest_detectable_tv),
        _count(audit.drafted),
        _count(audit.accepted),
        _count(audit.rejections),
        Cell(audit.dtype),
        _count(audit.top_k),
        Cell(f"{audit.temperature:g}", audit.temperature),
        _count(audit.horizon),
    )


def _count(number: int | None) -> Cell:
    return Cell(DASH if number is None else str(number), number)
