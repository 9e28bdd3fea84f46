"""`specbench explain`: what a metric means, and what others mean by the same word."""

from __future__ import annotations

import dataclasses
import json
import shutil
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from specbench.metrics.definitions import Definition

EXAMPLES = ("specbench explain ttft", "specbench explain 'draft acceptance rate'")


def explain(
    metric: Annotated[
        str, typer.Argument(metavar="METRIC", help="A metric's name; `specbench list metrics` lists them.")
    ],
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print a metric's definition and formula, and how other tools define or call it."""
    from specbench.metrics.definitions import find

    found = find(metric)
    if json_:
        document = {**dataclasses.asdict(found), "elsewhere": dict(found.elsewhere)}
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        typer.echo(describe(found, shutil.get_terminal_size((100, 24)).columns))


def describe(metric: Definition, width: int) -> str:
    """Write a definition as a short block of text; the formula stays on one line."""
    better = {"higher": ", higher is better", "lower": ", lower is better"}.get(metric.better, "")
    lines = [
        f"{metric.label} ({metric.unit}{better})",
        "",
        f"  formula  {metric.formula}",
        f"  field    {metric.key}" + (", shown in ms" if metric.unit == "seconds" else ""),
    ]
    if metric.note:
        lines += _wrapped("  note     ", metric.note, width)
    if metric.elsewhere:
        longest = max(map(len, metric.elsewhere))
        lines += ["", "  elsewhere"]
        for tool, meaning in metric.elsewhere.items():
            lines += _wrapped(f"    {tool:<{longest}}  ", meaning, width)
    return "\n".join(lines)


def _wrapped(head: str, text: str, width: int) -> list[str]:
    """Write text beside its head, the lines that follow below the first."""
    room = max(width, len(head) + 20)  # on a narrower terminal the terminal may fold it
    return textwrap.wrap(
        text, room, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )
