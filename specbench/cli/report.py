"""`specbench report`: show a stored run again."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from specbench.cli._runs import RUN_HELP, run_folder
from specbench.errors import UsageError

EXAMPLES = (
    "specbench report latest",
    "specbench report results/my-run --format markdown --output report.md",
)


def report(
    run: Annotated[str, typer.Argument(help=RUN_HELP, show_default=False)] = "latest",
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="terminal, markdown or json.")
    ] = "terminal",
    json_: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    width: Annotated[
        int | None, typer.Option(min=40, metavar="N", help="Columns; by default as wide as the terminal.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")
    ] = None,
) -> None:
    """Print the tables and conclusions of a stored run. No model is loaded."""
    from specbench.bench.store import RunStore
    from specbench.report import report as render
    from specbench.report import require_format

    format_ = "json" if json_ else format_
    require_format(format_)
    stored = RunStore.open(run_folder(run)).document
    color = output is None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if output and width is None:
        width = 120
    text = render(stored, format_, width, color=color)  # type: ignore[arg-type]
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise UsageError(
            f"cannot write {output}: {problem.strerror or problem}", hint="choose another --output"
        ) from None
    typer.echo(f"wrote {output}", err=True)
