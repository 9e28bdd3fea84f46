"""`specbench replay`: judge drafters that need no model by outputs that are already there."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.cli._runs import run_folder
from specbench.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from specbench.bench.replay import Outputs, Replayed
    from specbench.report.table import Table

EXAMPLES = (
    "specbench replay latest --strategy ngram:k=4 --strategy suffix:k=8,factor=2",
    "specbench replay outputs.jsonl --strategy suffix:corpus=yes,verify=exact --json",
)
FORMATS = ("terminal", "markdown", "json")
GREEDY = "T=0: exact. Every lossless rule accepts what agrees with the greedy output."
SAMPLED = (
    "T>0: what exact-match verification accepts on these samples; an estimate for other samples and for "
    "rejection sampling, which accepts such drafts with the same probability."
)
UNKNOWN = "No temperature is recorded: exact if the outputs are greedy, an estimate if they were sampled."
LEGEND = (
    "The verify option plays no part. A draft beyond the end of an output counts as not accepted. "
    "What drafting and longer target steps cost is not counted: `specbench run` measures it."
)
Words = list[str] | None


def replay(
    source: Annotated[
        str,
        typer.Argument(help="A run (folder, id or 'latest'), or a JSON Lines file.", show_default=False),
    ] = "latest",
    strategy: Annotated[
        Words, typer.Option(metavar="SPEC", help="name:key=value,...; repeat. By default ngram, suffix.")
    ] = None,
    workload: Annotated[
        Words, typer.Option(metavar="NAME", help="Only this workload; repeat for several.")
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="terminal, markdown or json.")
    ] = "terminal",
    json_: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    width: Annotated[
        int | None, typer.Option(min=40, metavar="N", help="Columns; by default as wide as the terminal.")
    ] = None,
) -> None:
    """Try model-free drafters on recorded outputs: what would have been accepted. No model is loaded.

    Of a run the baseline's outputs are taken. A file has one answer a line, as token ids:
    {"prompt": [1, 2], "output": [3, 4]}, with "workload" and "temperature" if you like.
    """
    from specbench.bench.replay import MODEL_FREE, model_free
    from specbench.bench.replay import replay as replayed
    from specbench.cli._progress import RichProgress

    format_ = "json" if json_ else format_
    if format_ not in FORMATS:
        raise UsageError(
            f"no format '{format_}'{did_you_mean(format_, FORMATS)}", hint=f"known: {', '.join(FORMATS)}"
        )
    specs = list(dict.fromkeys(strategy or MODEL_FREE))
    for spec in specs:
        model_free(spec)  # what cannot be replayed is refused before anything is
    name, outputs = _outputs(source, workload or [])
    with RichProgress() as progress:
        total = len(specs) * sum(len(group.recorded) for group in outputs)
        progress.stage(f"replaying {total // len(specs)} outputs", total)
        results = replayed(outputs, specs, progress.advance)
    notes = _notes(outputs)
    if format_ == "json":
        document = {"source": name, "notes": notes, "results": [_entry(result) for result in results]}
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
    elif format_ == "markdown":
        typer.echo(_markdown(name, results, notes), nl=False)
    else:
        columns = width or shutil.get_terminal_size((100, 24)).columns
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        typer.echo(_terminal(name, results, notes, columns, color), nl=False)


def _outputs(source: str, workloads: Sequence[str]) -> tuple[str, list[Outputs]]:
    from specbench.bench.replay import from_jsonl, from_run
    from specbench.bench.store import RunStore

    path = Path(source)
    if path.suffix == ".jsonl" or (path.is_file() and path.name != "run.json"):
        return str(path), from_jsonl(path, workloads)
    store = RunStore.open(run_folder(source))
    return f"run {store.document.run_id}", from_run(store, workloads)


def _notes(outputs: Sequence[Outputs]) -> list[str]:
    kinds = {None if group.temperature is None else group.temperature > 0 for group in outputs}
    notes = [(False, GREEDY), (True, SAMPLED), (None, UNKNOWN)]
    return [note for kind, note in notes if kind in kinds] + [LEGEND]


def _figures(result: Replayed) -> dict[str, float | None]:
    from specbench.metrics import acceptance

    counts = result.counts
    return {
        "tokens_per_target_step": acceptance.tokens_per_target_step(counts),
        "acceptance_length": acceptance.acceptance_length(counts),
        "draft_acceptance_rate": acceptance.draft_acceptance_rate(counts),
        "mean_draft_depth": acceptance.mean_draft_depth(counts),
        "draft_step_share": counts.draft_rounds / counts.decode_rounds if counts.decode_rounds else None,
    }


def _entry(result: Replayed) -> dict[str, object]:
    return {
        "strategy": result.strategy,
        "workload": result.workload,
        "temperature": result.temperature,
        "outputs": result.outputs,
        **asdict(result.counts),
        **_figures(result),
    }


def _table(results: Sequence[Replayed]) -> Table:
    from specbench.report.table import Cell, Column, Table
    from specbench.report.wording import DASH, fixed

    columns = (
        Column("workload", "workload", "workload", align="left"),
        Column("temperature", "T", "T"),
        Column("strategy", "strategy", "strategy", align="left"),
        Column("outputs", "outputs", "outputs"),
        Column("tokens_per_target_step", "tokens\n/step", "tokens per target step"),
        Column("acceptance_length", "acc.\nlength", "acceptance length"),
        Column("draft_acceptance_rate", "draft\nacc.\nrate", "draft acceptance rate"),
        Column("mean_draft_depth", "draft\ndepth", "mean draft depth"),
        Column("draft_step_share", "steps\nwith a\ndraft", "steps with a draft", "%"),
    )
    rows, breaks = [], set()
    for place, result in enumerate(results):
        before = results[place - 1]
        if place and (before.workload, before.temperature) != (result.workload, result.temperature):
            breaks.add(place)
        figures = _figures(result)
        share = figures.pop("draft_step_share")
        temperature, is_all = result.temperature, result.workload is None
        rows.append(
            (
                Cell("all" if is_all else result.workload or ""),
                Cell("all" if is_all else DASH if temperature is None else f"{temperature:g}", temperature),
                Cell(result.strategy),
                Cell(str(result.outputs), result.outputs),
                *(Cell(fixed(value), value) for value in figures.values()),
                Cell(DASH if share is None else f"{100 * share:.0f}", share),
            )
        )
    return Table("replay", columns, tuple(rows), 3, breaks=frozenset(breaks))


def _conclusion(results: Sequence[Replayed]) -> str:
    """Say which strategy gave most tokens per step over all outputs."""
    last = results[-1]
    pooled = [r for r in results if (r.workload, r.temperature) == (last.workload, last.temperature)]
    rated = [(figure, r) for r in pooled if (figure := _figures(r)["tokens_per_target_step"]) is not None]
    if not rated:
        return "No output has a second token, so nothing could be drafted."
    most, best = max(rated, key=lambda pair: pair[0])
    if len(rated) > 1 and all(figure == most for figure, _ in rated):
        return f"All strategies gave {most:.2f} tokens per target step over {best.outputs} outputs."
    return f"{best.strategy} gave most: {most:.2f} tokens per target step over {best.outputs} outputs."


def _title(name: str) -> str:
    return f"specbench replay: {name}"


def _terminal(name: str, results: Sequence[Replayed], notes: Sequence[str], width: int, color: bool) -> str:
    from specbench.report.terminal import console_for, print_lines, print_table

    output = io.StringIO()
    console = console_for(output, width, color)
    console.print(_title(name), style="bold")
    print_table(console, _table(results), width)
    print_lines(console, notes, "dim")
    print_lines(console, (_conclusion(results),), "bold")
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def _markdown(name: str, results: Sequence[Replayed], notes: Sequence[str]) -> str:
    from specbench.report.markdown import inline, table_lines

    listed = "\n".join(f"- {inline(note)}" for note in notes)
    blocks = [
        f"### {inline(_title(name))}",
        f"**{inline(_conclusion(results))}**",
        "\n".join(table_lines(_table(results))),
        f"<details><summary>Notes</summary>\n\n{listed}\n\n</details>",
    ]
    return "\n\n".join(blocks) + "\n"
