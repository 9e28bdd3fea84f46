"""`specbench doctor`: is the installation sound, what can this machine do, do two models fit."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

EXAMPLES = (
    "specbench doctor",
    "specbench doctor --target ./my-model --draft ./my-draft --dtype bfloat16",
)


def doctor(
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Target: folder, .gguf file, hub id or alias.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Draft: does it fit, and may it pay?")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="float32, bfloat16, float16 or auto.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, ...")] = "cpu",
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check the installation, measure the machine's bounds, and see whether models fit.

    Exits with 1 if a check failed; a warning, such as a busy machine, leaves it at 0.
    """
    from specbench import doctor as examination

    found = examination.diagnose(target, draft, dtype=dtype, device=device, tell=_tell)
    typer.echo(examination.document(found) if json_ else examination.text(found), nl=False)
    raise typer.Exit(1 if found.outcome == "problem" else 0)


def _tell(line: str) -> None:
    if sys.stderr.isatty():
        typer.echo(f"{line} ...", err=True)
