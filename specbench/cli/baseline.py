"""`specbench baseline`: keep a run's counts and audit verdicts for the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli._runs import RUN_HELP, run_folder
from specbench.errors import UsageError

EXAMPLES = (
    "specbench baseline latest --output baselines/ci.json",
    "specbench baseline results/my-run",
)


def baseline(
    run: Annotated[str, typer.Argument(help=RUN_HELP, show_default=False)] = "latest",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="By default baselines/RUN.json; replaced if there.")
    ] = None,
) -> None:
    """Store the counts and audit verdicts of a run, for `specbench gate`. No times: they are not compared."""
    from specbench.bench.store import RunStore
    from specbench.gate import snapshot

    taken = snapshot.of_run(RunStore.open(run_folder(run)))
    snapshot.require_sound(taken)
    path = output or Path("baselines") / f"{taken.run_id}.json"
    text = snapshot.to_json(taken)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise UsageError(
            f"cannot write {path}: {problem.strerror or problem}", hint="choose another --output"
        ) from None
    typer.echo(
        f"{path}: counts of {len(taken.cells)} cells and {len(taken.audits)} audits, no times; "
        f"{len(text.encode()) / 1024:.0f} KB"
    )
