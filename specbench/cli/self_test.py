"""`specbench self-test`: plant every known fault, and see that the audit notices."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specbench.audit.self_test import Outcome
    from specbench.report.table import Cell, Table, Tone

EXAMPLES = (
    "specbench self-test --quick",
    "specbench self-test --seeds 20 --output results/audit/self-test.json",
)


def self_test(
    quick: Annotated[bool, typer.Option("--quick", help="One seed of each: minutes.")] = False,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Seeds of each case.")] = 5,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this fault or strategy; repeat.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes at once; by default one a core.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Keep every result in this file as it is reached, and the table beside it as FILE.md. "
            "A rerun goes on from what is there; more --seeds add to them.",
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check the audit itself: all injected faults are caught, and innocent variants are not accused."""
    from specbench.audit.self_test import cases
    from specbench.bench.self_test import run
    from specbench.cli._progress import RichProgress
    from specbench.environment import usable_cores
    from specbench.errors import UsageError, did_you_mean

    known = [case.name for case in cases()]
    for name in fault or ():
        if name not in known:
            raise UsageError(
                f"no fault '{name}'{did_you_mean(name, known)}", hint="known: `specbench list faults`"
            )
    if output is not None and output.suffix != ".json":
        raise UsageError(f"--output is {output}; expected a name that ends in .json")
    with RichProgress() as progress:
        outcomes = run(
            cases(fault or ()),
            seeds=1 if quick else seeds,
            num_workers=workers or usable_cores(),
            output=output,
            progress=progress,
        )
    table = _table(outcomes)
    if output is not None:
        from specbench.bench.store import replace_file
        from specbench.report.markdown import inline, table_lines

        blocks = ["\n".join(table_lines(table)), *map(inline, table.notes)]
        replace_file(output.with_suffix(".md"), ("\n\n".join(blocks) + "\n").encode())
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
    from specbench.report.table import Column, Table

    columns = (
        Column("case", "fault or strategy", "fault or strategy", align="left"),
        Column("group", "class", "class", align="left"),
        Column("expected", "expected", "expected", align="left"),
        Column("caught", "alarms", "alarms in seeds"),
        Column("by", "by", "by", align="left"),
        Column("tokens", "tokens", "median tokens to the alarm (range)"),
        Column("tv", "TV", "TV per token, where it shows most"),
        Column("regime", "in", "there: regime", align="left"),
        Column("alternative", "most like", "there: most like", align="left"),
    )
    rows = tuple(_row(o) for o in outcomes)
    return Table(
        "self-test: does the audit notice?", columns, rows, num_keys=1, notes=tuple(_notes(outcomes))
    )


def _notes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    if any(o.tokens is not None for o in outcomes):
        yield (
            "Tokens: scored when the e-process alarmed or, where only another test did, at the end of its "
            "batch. A dash: only contracts, records, log-probabilities or greedy output gave it away."
        )
    if any(o.tv is not None for o in outcomes):
        yield (
            "TV: how far the law of an emitted token is from the target's in the direction that fits best, "
            "in the draft regime with the most evidence (own: the strategy's own draft; self, good, bad: "
            "synthetic ones, equal to the target, like it, unlike it). It is a lower bound of the whole "
            "distance, estimated on other sequences than those that chose the direction; the median over the "
            "seeds under which the e-process alarmed. A dash: it did not, as another test was first or no "
            "law is changed."
        )
    if any(o.expected == "too small" for o in outcomes):
        yield "`too small`: rounding that samples cannot tell."
    if innocent := [o for o in outcomes if o.expected in ("innocent", "acceptance only")]:
        yield (
            f"{sum(o.caught for o in innocent)} of {sum(o.seeds for o in innocent)} audits of "
            f"{len(innocent)} decoders that change no output raised an alarm. `acceptance only`: the fault "
            "costs acceptance and nothing else."
        )
    if faults := [o for o in outcomes if o.expected == "caught"]:
        yield (
            f"{sum(o.is_right for o in faults)} of {len(faults)} faults that change an output or a record "
            "were caught under every seed."
        )


def _row(outcome: Outcome) -> tuple[Cell, ...]:
    from specbench.report.table import Cell
    from specbench.report.wording import DASH, fixed

    tone: Tone = "plain" if outcome.is_right else "bad"
    tv = None if outcome.tv is None else round(outcome.tv, 2) + 0.0  # an estimate of no effect: not -0.00
    tokens = DASH if outcome.tokens is None else f"{outcome.tokens:.0f}"
    if outcome.tokens_range is not None and outcome.seeds > 1:
        tokens += " ({}–{})".format(*outcome.tokens_range)
    return (
        Cell(outcome.case),
        Cell(outcome.group),
        Cell(outcome.expected, tone=tone),
        Cell(f"{outcome.caught}/{outcome.seeds}" + ("" if outcome.is_right else " !"), tone=tone),
        Cell(", ".join(outcome.by) or DASH),
        Cell(tokens, outcome.tokens),
        Cell(fixed(tv), outcome.tv),
        Cell(outcome.regime or DASH),
        Cell(outcome.alternative or DASH),
    )
