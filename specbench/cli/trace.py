"""`specbench trace`: draw the rounds of one request."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench.cli._runs import RUN_HELP, run_folder
from specbench.errors import NotMeasured, SpecbenchError, UsageError, did_you_mean

if TYPE_CHECKING:
    from specbench.records import CellRecords, RequestRecord, RoundRecord

EXAMPLES = (
    "specbench trace latest --strategy draft:topk=2,depth=3",
    "specbench trace latest --workload tiny-predictable --prompt 2 --rounds 5",
)

WIDTH = 10_000


def trace(
    run: Annotated[str, typer.Argument(help=RUN_HELP, show_default=False)] = "latest",
    strategy: Annotated[
        str | None, typer.Option(metavar="SPEC", help="As in the run; by default the first that drafts.")
    ] = None,
    workload: Annotated[str | None, typer.Option(metavar="NAME", help="By default the run's first.")] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="By default the first measured.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, metavar="N", help="Which request of that cell, from 1.")] = 1,
    rounds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the first N rounds after the prefill.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Draw what was drafted, kept and emitted, round by round, as trees."""
    from specbench.bench.store import RunStore

    store = RunStore.open(run_folder(run))
    cells = [cell for cell in store.cells() if cell.key.load == "c=1"]
    if not cells:
        raise NotMeasured("this run recorded no drafts: it has no load c=1", hint="run again with --load c=1")
    cell = _chosen(cells, strategy, workload, temperature)
    request, its_rounds = _request(cell, prompt)
    if rounds is not None:
        its_rounds = [entry for entry in its_rounds if entry.round <= rounds]
    if json_:
        document = {
            "cell": str(cell.key),
            "request": asdict(request),
            "rounds": [asdict(r) for r in its_rounds],
        }
        typer.echo(json.dumps(document, ensure_ascii=False))
        return
    if store.document.config.get("engine") == "simulated":
        raise NotMeasured("this run was simulated: it drafted no tokens", hint="trace a run of a model")
    if any(entry.drafted and entry.draft_tokens is None for entry in its_rounds):
        raise NotMeasured("this run was stored without its draft tokens", hint="run it again")
    from rich.console import Console

    from specbench.report.trace import as_tree

    show = _shower(store.document.config)
    title = f"{cell.key}: prompt {request.prompt_id}, {len(request.output_tokens)} tokens"
    # A tree cuts its lines off at the console's width: leave long ones to the terminal.
    Console(highlight=False, soft_wrap=True, width=WIDTH).print(as_tree(title, request, its_rounds, show))


def _chosen(
    cells: list[CellRecords], strategy: str | None, workload: str | None, temperature: float | None
) -> CellRecords:
    """Pick one cell, or say what there is."""

    def pick(name: str, wanted: Any, of: Callable[[CellRecords], Any]) -> None:
        nonlocal cells
        known = list(dict.fromkeys(of(cell) for cell in cells))
        if wanted is None:
            wanted = known[0]
        if wanted not in known:
            raise UsageError(
                f"this run has no {name} '{wanted}'{did_you_mean(str(wanted), map(str, known))}",
                hint=f"it has {', '.join(map(str, known))}",
            )
        cells = [cell for cell in cells if of(cell) == wanted]

    pick("workload", workload, lambda cell: cell.key.workload)
    pick("temperature", temperature, lambda cell: cell.key.temperature)
    if strategy is None:
        drafting = (c.key.strategy for c in cells if any(r.drafted for s in c.servings for r in s.rounds))
        strategy = next(drafting, None)
    pick("strategy", strategy, lambda cell: cell.key.strategy)
    return cells[0]


def _request(cell: CellRecords, number: int) -> tuple[RequestRecord, list[RoundRecord]]:
    """Return one request of a cell and its rounds, in order."""
    listed = [(serving, request) for serving in cell.servings for request in serving.requests]
    listed.sort(key=lambda pair: (pair[0].repeat, pair[0].unit, pair[1].request))
    if number > len(listed):
        raise UsageError(f"--prompt {number}: this cell has {len(listed)} requests", hint="count from 1")
    serving, request = listed[number - 1]
    rounds = [entry for entry in serving.rounds if entry.request == request.request]
    return request, sorted(rounds, key=lambda entry: entry.round)


def _shower(config: dict[str, Any]) -> Callable[[int], str]:
    """Return how a token is shown: its text where the target's tokenizer is at hand, else its id."""
    target = (config.get("models") or {}).get("target")
    if target is None:
        return str
    try:
        from specbench.models import resolve
        from specbench.models.load import load_tokenizer
        from specbench.models.quiet import quiet

        found = resolve(target["name"], offline=True)
        with quiet():
            tokenizer = load_tokenizer(Path(found.path), found.gguf_file)
    except (SpecbenchError, OSError, ValueError) as problem:
        typer.echo(f"note: tokens are shown as ids, the tokenizer is not here ({problem})", err=True)
        return str
    return lambda token: repr(tokenizer.decode([token]))
