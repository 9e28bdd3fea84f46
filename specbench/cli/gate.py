"""`specbench gate`: fail if a run is worse than its baseline, in counts or in its audit."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.cli._runs import RUN_HELP, run_folder

if TYPE_CHECKING:
    from specbench.gate.compare import AuditComparison, Comparison, Gate
    from specbench.report.table import Cell, Table

EXAMPLES = (
    "specbench gate latest --baseline baselines/ci.json",
    "specbench gate results/my-run --baseline baselines/ci.json --format markdown",
)

LEGEND = (
    "Relative changes. Paired by prompt; FAIL where p is below the limit and the change above the "
    "tolerance. detectable: the change that would have failed with probability .99, given this noise. "
    "same: equal counts, prompt by prompt. imprecise: no change found, but {promise:.0f} % could have been "
    "missed. untested: too few prompts.",
    "A rise fails too: accepting too often is a fault. If the change was meant, store a new baseline. "
    "Times are not compared.",
)


def gate(
    run: Annotated[str, typer.Argument(help=RUN_HELP, show_default=False)] = "latest",
    *,
    baseline: Annotated[Path, typer.Option(metavar="FILE", help="Made by `specbench baseline`.")],
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="terminal, markdown or json.")
    ] = "terminal",
    json_: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    width: Annotated[
        int | None, typer.Option(min=40, metavar="N", help="Columns; by default as wide as the terminal.")
    ] = None,
) -> None:
    """Compare a run's counts and audits with a baseline; times are not compared.

    Exit code 0: nothing worse. 1: a count changed, or an audit failed. 3: could not be compared.
    """
    from specbench.bench.store import RunStore
    from specbench.gate import snapshot
    from specbench.gate.compare import gate as compare
    from specbench.report import require_format

    format_ = "json" if json_ else format_
    require_format(format_)
    kept = snapshot.read(baseline)
    result = compare(kept, snapshot.of_run(RunStore.open(run_folder(run))))
    if format_ == "json":
        document = {
            **asdict(result),
            "exit_code": result.exit_code,
            "failures": list(result.failures),
            "conclusion": result.conclusion,
        }
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
    elif format_ == "markdown":
        typer.echo(_markdown(result), nl=False)
    else:
        columns = width or shutil.get_terminal_size((100, 24)).columns
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        typer.echo(_terminal(result, columns, color), nl=False)
    if result.exit_code == 3:
        typer.echo(f"error: not compared: {result.problems[0]}", err=True)
    raise typer.Exit(result.exit_code)


# The tables


def _tables(result: Gate) -> list[Table]:
    found = []
    if result.comparisons:
        found.append(_counts_table(result.comparisons))
    if result.audits:
        found.append(_audits_table(result.audits))
    return found


def _counts_table(comparisons: tuple[Comparison, ...]) -> Table:
    from specbench.gate.compare import NAMES
    from specbench.report.table import Column, Table
    from specbench.report.wording import probability

    columns = [
        Column("strategy", "strategy", "strategy", align="left"),
        Column("cell", "cell", "cell", align="left"),
    ]
    for metric, label in NAMES.items():
        short = {"tokens_per_target_step": "tokens\n/step", "draft_acceptance_rate": "acc.\nrate"}[metric]
        columns += [
            Column("baseline", f"{short}\nbaseline", f"{label}: baseline", group=metric),
            Column("run", "run", "run", group=metric),
            Column("change", "change", "change", "%", group=metric),
            Column("p_value", "p", "p", group=metric),
            Column("smallest_detectable", "detect-\nable", "detectable", "%", group=metric),
            Column("prompts", "prompts", "prompts", group=metric),
            Column("outcome", "verdict", "verdict", group=metric, align="left"),
        ]
    rows, breaks = [], set()
    pairs = [comparisons[place : place + 2] for place in range(0, len(comparisons), 2)]
    for place, pair in enumerate(pairs):
        if place and pair[0].strategy != pairs[place - 1][0].strategy:
            breaks.add(place)
        rows.append(_counts_row(pair))
    levels = {c.cell is None: c.level for c in comparisons}
    limits = [
        f"p limit {probability(level)} {'over all cells of a strategy' if is_total else 'in a cell'}"
        for is_total, level in sorted(levels.items(), reverse=True)
    ]
    tolerances = sorted({c.tolerance for c in comparisons})
    note = f"{', '.join(limits)}; tolerance {' or '.join(f'{100 * t:.0f} %' for t in tolerances)}."
    return Table("counts", tuple(columns), tuple(rows), 2, (note,), frozenset(breaks))


def _counts_row(pair: tuple[Comparison, ...]) -> tuple[Cell, ...]:
    from specbench.report.table import Cell
    from specbench.report.wording import DASH, fixed, probability

    key = pair[0].cell
    where = "all cells" if key is None else f"{key.workload} T={key.temperature:g} {key.load}"
    cells = [Cell(pair[0].strategy), Cell(where)]
    words = {"fell": "FAIL: fell", "rose": "FAIL: changed (rose)"}
    tones = {"fell": "bad", "rose": "bad", "imprecise": "doubtful", "untested": "doubtful"}
    for c in pair:
        cells += [
            Cell(fixed(c.baseline, 3), c.baseline),
            Cell(fixed(c.run, 3), c.run),
            Cell(DASH if c.change is None else f"{100 * c.change:+.1f}", c.change),
            Cell(probability(c.p_value), c.p_value),
            Cell(
                DASH if c.smallest_detectable is None else f"{100 * c.smallest_detectable:.0f}",
                c.smallest_detectable,
            ),
            Cell(str(c.prompts), c.prompts),
            Cell(words.get(c.outcome, c.outcome), tone=tones.get(c.outcome, "plain")),  # type: ignore[arg-type]
        ]
    return tuple(cells)


def _audits_table(audits: tuple[AuditComparison, ...]) -> Table:
    from specbench.report.table import Cell, Column, Table
    from specbench.report.wording import DASH, fixed, monte_carlo

    columns = (
        Column("strategy", "strategy", "strategy", align="left"),
        Column("baseline", "baseline", "baseline", align="left"),
        Column("run", "run", "run", align="left"),
        Column("p_value", "p", "p"),
        Column("smallest_detectable_tv", "smallest\ndetectable TV", "smallest detectable TV"),
        Column("outcome", "verdict", "verdict", align="left"),
    )
    words = {
        "ok": "ok", "failed": "FAIL", "worse": "FAIL: no longer lossless", "missing": "NOT COMPARED",
        "unchecked": "not checked",
    }  # fmt: skip
    tones = {"failed": "bad", "worse": "bad", "missing": "doubtful"}
    rows = [
        (
            Cell(audit.strategy),
            Cell(audit.baseline.verdict if audit.baseline else DASH),
            Cell(audit.run.verdict if audit.run else DASH),
            Cell(monte_carlo(audit.run.p_value, audit.run.alpha) if audit.run else DASH),
            Cell(fixed(audit.run.smallest_detectable_tv if audit.run else None, 3)),
            Cell(words[audit.outcome], tone=tones.get(audit.outcome, "plain")),  # type: ignore[arg-type]
        )
        for audit in audits
    ]
    return Table("chi-squared audits", columns, tuple(rows), 1)


def _lines(result: Gate) -> list[str]:
    """Return what stands under the tables, but the conclusion."""
    from specbench.gate.compare import PROMISE

    legend = [line.format(promise=100 * PROMISE) for line in LEGEND] if result.comparisons else []
    several = len(result.problems) > 1 or result.failures
    problems = [f"not compared: {problem}" for problem in result.problems] if several else []
    return [*problems, *(f"note: {note}" for note in result.notes), *legend]


def _terminal(result: Gate, width: int, color: bool) -> str:
    from specbench.report.terminal import console_for, print_lines, print_table

    output = io.StringIO()
    console = console_for(output, width, color)
    console.print(f"specbench gate: run {result.run_id} against baseline {result.baseline_id}", style="bold")
    for table in _tables(result):
        print_table(console, table, width)
    print_lines(console, _lines(result), "dim")
    print_lines(console, (result.conclusion,), "bold")
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def _markdown(result: Gate) -> str:
    from specbench.report.markdown import inline, table_lines

    title = f"specbench gate: run {result.run_id} against baseline {result.baseline_id}"
    blocks = [f"### {inline(title)}", f"**{inline(result.conclusion)}**"]
    for table in _tables(result):
        blocks += [f"#### {inline(table.title)}", "\n".join(table_lines(table))]
        blocks += [inline(note) for note in table.notes]
    if lines := _lines(result):
        listed = "\n".join(f"- {inline(line)}" for line in lines)
        blocks.append(f"<details><summary>Notes and legend</summary>\n\n{listed}\n\n</details>")
    return "\n\n".join(blocks) + "\n"
