"""`specbench run`: measure strategies on workloads, check their distribution, print the table."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = (
    "specbench run --models smollm2 --quick",
    "specbench run --target ./my-model --draft ./my-draft --strategy draft:k=4 --workload prompts.jsonl",
)

Words = list[str] | None


def run(
    models: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A bundled set: tiny (the default), smollm2.", rich_help_panel="Models"
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Target: folder, .gguf file, hub id or alias.")
    ] = None,
    draft: Annotated[str | None, typer.Option(metavar="MODEL", help="Draft model for `draft`.")] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="float32, bfloat16, float16 or auto.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, ...")] = "cpu",
    draft_device: Annotated[str | None, typer.Option(metavar="DEVICE", help="Where the draft lives.")] = None,
    strategy: Annotated[
        Words, typer.Option(metavar="SPEC", help="name:key=value,...; repeat. `specbench list strategies`.")
    ] = None,
    workload: Annotated[
        Words, typer.Option(metavar="NAME", help="A bundled workload, a prompt file, or hub:ID; repeat.")
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(metavar="T", help="Repeat for several.")] = None,
    sampling: Annotated[
        Words, typer.Option(metavar="NAME=VALUE", help="top_k=50, top_p=.9, ...: for every request; repeat.")
    ] = None,
    load: Annotated[Words, typer.Option(metavar="LOAD", help="c=8, poisson=0.7 or rate=2/s; repeat.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Prompts a workload.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens an answer.")] = None,
    samples: Annotated[
        int, typer.Option(min=1, metavar="N", help="Samples of a prompt, from one prefill.")
    ] = 1,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Repeats, interleaved.")] = 1,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Requests decoded together at most.")] = 32,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of all sampling.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Few prompts, short answers: minutes.")] = False,
    audit: Annotated[bool, typer.Option(help="Check the output distribution.")] = True,
    audit_budget: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Audit by all tests: quick, standard or deep. Else continuations only."
        ),
    ] = None,
    audit_dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="float32: exact; see `specbench audit`.")
    ] = "float32",
    inject: Annotated[
        str | None, typer.Option(metavar="FAULT", help="Break every strategy; `specbench list faults`.")
    ] = None,
    engine: Annotated[str, typer.Option(metavar="SPEC", help="local, or simulated:alpha=.8,...")] = "local",
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders go.")] = Path("results"),
    run_id: Annotated[str | None, typer.Option(metavar="ID", help="Name of the run folder.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not resume an unfinished run.")] = False,
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="terminal, markdown or json.")
    ] = "terminal",
) -> None:
    """Measure decoding strategies and check that they kept the target's distribution."""
    from specbench.bench.config import (
        DEFAULT_STRATEGIES,
        DEFAULT_WORKLOADS,
        MODEL_SETS,
        ModelSet,
        RunConfig,
        model_set,
    )
    from specbench.bench.run import outcome
    from specbench.bench.run import run as carry_out
    from specbench.cli._progress import RichProgress
    from specbench.report import report, require_format

    require_format(format_)
    simulated = engine.partition(":")[0] == "simulated"
    bundled = not (models or target or simulated)
    name = None if simulated and not models else model_set(models, target)
    usual = MODEL_SETS[target].dtype if target in MODEL_SETS else "auto"
    own = ModelSet(target or "simulated", draft, usual, DEFAULT_STRATEGIES, DEFAULT_WORKLOADS)
    chosen = MODEL_SETS[name] if name is not None else own
    drafts = draft or chosen.draft
    strategies = chosen.strategies + (("draft:k=4",) if draft and name is None else ())
    config = RunConfig(
        target=chosen.target,
        draft=drafts,
        dtype=dtype or chosen.dtype,
        device=device,
        draft_device=draft_device,
        engine=engine,
        strategies=tuple(strategy or strategies),
        workloads=tuple(workload or chosen.workloads),
        temperatures=tuple(temperature) if temperature else None,
        loads=tuple(load) if load else None,
        limit=limit,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        rows=rows,
        seed=seed,
        sampling=tuple(sampling or ()),
        samples=samples,
        quick=quick or bundled,
        audit=audit,
        audit_dtype=audit_dtype,
        audit_budget=audit_budget or ("quick" if bundled else None),
        inject=inject,
    )
    with RichProgress() as progress:
        document = carry_out(config, output, progress, run_id=run_id, fresh=fresh)
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    typer.echo(report(document, format_, None, color=color), nl=False)  # type: ignore[arg-type]
    typer.echo(f"\nstored in {output / document.run_id}", err=True)
    if bundled:
        typer.echo(
            "this was the bundled pair; for your own: specbench run --target MODEL --draft MODEL "
            "--workload prompts.jsonl",
            err=True,
        )
    raise typer.Exit(outcome(document))
