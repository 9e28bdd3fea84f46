"""`specbench self-test`: plant every known fault, and see that the audit notices."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.audit.self_test import Outcome
    from specbench.report.table import Table

EXAMPLES = ("specbench self-test --quick", "specbench self-test --fault residual-from-p --seeds 20")


def self_test(
    quick: Annotated[bool, typer.Option("--quick", help="One seed of each: minutes.")] = False,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Seeds of each case.")] = 5,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this fault or strategy; repeat.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the table to this file, as markdown.")
    ] = None,
) -> None:
    """Check the audit itself: all injected faults are caught, and innocent variants are not accused."""
    from specbench.audit.self_test import cases, run
    from specbench.cli._progress import RichProgress
    from specbench.errors import UsageError, did_you_mean

    chosen = cases(fault or ())
    known = [case.name for case in cases()]
    for name in fault or ():
        if name not in known:
            raise UsageError(
                f"no fault '{name}'{did_you_mean(name, known)}", hint="known: `specbench list faults`"
            )
    outcomes: list[Outcome] = []
    with RichProgress() as progress:
        progress.stage("self-test", total=len(chosen))
        for outcome in run(chosen, seeds=1 if quick else seeds):
            outcomes.append(outcome)
            progress.advance(1, f"self-test: {outcome.case}")
    table = _table(outcomes)
    if output is not None:
        from specbench.report.markdown import inline, table_lines

        output.parent.mkdir(parents=True, exist_ok=True)
        notes = [inline(note) for note in table.notes]
        output.write_text("\n".join([*table_lines(table), "", *notes]) + "\n", encoding="utf-8")
    if json_:
        typer.echo(json.dumps([{**asdict(o), "is_right": o.is_right} for o in outcomes]))
    else:
        import io

        from specbench.report.terminal import console_for, print_table

        width = shutil.get_terminal_size((120, 24)).columns
        text = io.StringIO()
        print_table(console_for(text, width, False), table, width)
        typer.echo("\n".join(line.rstrip() for line in text.getvalue().splitlines()))
    raise typer.Exit(0 if all(outcome.is_right for outcome in outcomes) else 1)


def _table(outcomes: Sequence[Outcome]) -> Table:
    from specbench.report.table import Cell, Column, Table
    from specbench.report.wording import DASH, fixed

    columns = (
        Column("case", "fault or strategy", "fault or strategy", align="left"),
        Column("group", "class", "class", align="left"),
        Column("expected", "expected", "expected", align="left"),
        Column("caught", "alarms", "alarms"),
        Column("by", "by", "by", align="left"),
        Column("tokens", "tokens", "median tokens to the alarm"),
        Column("tv", "TV", "TV in the best-fitting direction"),
        Column("alternative", "most like", "most like", align="left"),
    )
    rows = tuple(
        (
            Cell(o.case),
            Cell(o.group),
            Cell(o.expected, tone="plain" if o.is_right else "bad"),
            Cell(
                f"{o.caught}/{o.seeds}" + ("" if o.is_right else " !"), tone="plain" if o.is_right else "bad"
            ),
            Cell(", ".join(o.by) or DASH),
            Cell(DASH if o.tokens is None else f"{o.tokens:.0f}", o.tokens),
            Cell(fixed(o.tv), o.tv),
            Cell(o.alternative or DASH),
        )
        for o in outcomes
    )
    faults = [o for o in outcomes if o.expected == "caught"]
    innocent = [o for o in outcomes if o.expected in ("innocent", "acceptance only")]
    notes = (
        f"{sum(o.is_right for o in faults)} of {len(faults)} faults that change an output or a record were "
        f"caught under every seed; {sum(o.caught > 0 for o in innocent)} of {len(innocent)} decoders that "
        "change no output were accused. `acceptance only`: the fault costs acceptance and nothing else. "
        "`too small`: rounding that samples cannot tell.",
    )
    return Table("self-test: does the audit notice?", columns, rows, num_keys=1, notes=notes)
