"""`specbench explain`: what a metric means, and what others mean by the same word."""

from __future__ import annotations

import dataclasses
import json
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
        typer.echo(describe(found))


def describe(metric: Definition) -> str:
    """Write a definition as a short block of text."""
    better = {"higher": ", higher is better", "lower": ", lower is better"}.get(metric.better, "")
    lines = [
        f"{metric.label} ({metric.unit}{better})",
        "",
        f"  formula  {metric.formula}",
        f"  field    {metric.key}" + (", shown in ms" if metric.unit == "seconds" else ""),
    ]
    if metric.note:
        lines.append(f"  note     {metric.note}")
    if metric.elsewhere:
        width = max(map(len, metric.elsewhere))
        lines += ["", "  elsewhere"]
        lines += [f"    {tool:<{width}}  {meaning}" for tool, meaning in metric.elsewhere.items()]
    return "\n".join(lines)
