"""`specbench audit`: is the output distribution still the target's?"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = (
    "specbench audit --models smollm2 --strategy ngram:k=4 --budget standard",
    "specbench audit --strategy draft:k=3 --inject residual-from-p --explain",
)

Words = list[str] | None


def audit(
    models: Annotated[
        str | None, typer.Option(metavar="NAME", help="A bundled set: tiny (the default), smollm2.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Target: folder, .gguf file, hub id or alias.")
    ] = None,
    draft: Annotated[str | None, typer.Option(metavar="MODEL", help="Draft model for `draft`.")] = None,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="float32: exact. bfloat16, float16: beyond a measured floor.")
    ] = "float32",
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, ...")] = "cpu",
    draft_device: Annotated[str | None, typer.Option(metavar="DEVICE", help="Where the draft lives.")] = None,
    strategy: Annotated[
        Words, typer.Option(metavar="SPEC", help="name:key=value,...; repeat. `specbench list strategies`.")
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="NAME", help="quick, standard or deep: scored tokens per strategy.")
    ] = "quick",
    tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Another number of scored tokens.")
    ] = None,
    temperature: Annotated[float, typer.Option(metavar="T", help="Of what is sampled.")] = 1.0,
    sampling: Annotated[
        Words, typer.Option(metavar="NAME=VALUE", help="Another parameter of every request; repeat.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(metavar="NAME", help="Take the prompts from a workload or a file.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of everything drawn.")] = 0,
    inject: Annotated[
        str | None, typer.Option(metavar="FAULT", help="Break every strategy; `specbench list faults`.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Look again at the worst position of an audit.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say in words what every test found.")] = False,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw the evidence as SVG files; needs matplotlib.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where audits go.")] = Path("results"),
    run_id: Annotated[str | None, typer.Option(metavar="ID", help="Name of the audit's folder.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not resume an unfinished audit.")] = False,
) -> None:
    """Test that decoding strategies kept the target's distribution, and say how hard it was tried."""
    from specbench.bench.audit import AUDITED, AuditConfig, outcome, replayed, run, write_worst
    from specbench.bench.config import MODEL_SETS, model_set
    from specbench.bench.loading import check_writable
    from specbench.cli._progress import RichProgress
    from specbench.report.audit import render
    from specbench.report.audit_plots import left_out, require_matplotlib, write_plots

    if replay is not None:
        with RichProgress() as progress:
            lines = replayed(replay, progress)
        typer.echo("\n".join(lines))
        return
    if plots is not None:
        require_matplotlib()
        check_writable(plots, "--plots")
    name = model_set(models, target)
    chosen = MODEL_SETS[name] if name is not None else None
    drafts = draft or (chosen.draft if chosen else None)
    usual = AUDITED.get(name or "", ("ngram:k=4", *(("draft:k=3",) if drafts else ())))
    config = AuditConfig(
        target=chosen.target if chosen else str(target),
        draft=drafts,
        dtype=dtype,
        device=device,
        draft_device=draft_device,
        strategies=tuple(strategy or usual),
        budget=budget,
        tokens=tokens,
        sampling=tuple(sampling or ()),
        temperature=temperature,
        workload=workload,
        seed=seed,
        inject=inject,
    )
    with RichProgress() as progress:
        document = run(config, output, progress, run_id=run_id, fresh=fresh)
    written = write_worst(document)
    if json_:
        records = [asdict(record) for record in document.records]
        typer.echo(json.dumps({"config": document.config, "records": records}, ensure_ascii=False))
    else:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        width = shutil.get_terminal_size((120, 24)).columns
        typer.echo(render(document.records, width=width, color=color, explain=explain), nl=False)
    for path in written:
        typer.echo(f"look again at the worst position: specbench audit --replay {path}", err=True)
    if plots is not None:
        drawn = write_plots(document.records, plots)
        for reason in (line for record in document.records for line in left_out(record)):
            typer.echo(reason, err=True)
        typer.echo(f"{len(drawn)} plots in {plots}", err=True)
    typer.echo(f"stored in {document.folder}", err=True)
    raise typer.Exit(outcome(document.records))
