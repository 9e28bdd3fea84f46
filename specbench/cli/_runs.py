"""What may be written where a command asks for a RUN."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from specbench.errors import UsageError, did_you_mean

RESULTS = Path("results")
RUN_HELP = "A run's folder or its run.json, its id in results/, or 'latest' (complete, not simulated)."


def run_folder(run: str, results: Path = RESULTS) -> Path:
    """Return the folder of a run: a path, an id in results/, or `latest`."""
    if run == "latest":
        return _latest(results)
    path = Path(run)
    if path.name == "run.json":
        return path.parent
    if path.exists():
        return path
    if (results / run / "run.json").exists():
        return results / run
    near = did_you_mean(run, [folder.name for folder in _runs(results)])
    raise UsageError(f"no run '{run}'{near}", hint="name a run's folder, its id in results/, or 'latest'")


def _latest(results: Path) -> Path:
    """Choose the newest complete run of a model, else the newest of all, and say on stderr which it is."""
    newest_first = sorted(
        _runs(results),
        key=lambda folder: ((folder / "run.json").stat().st_mtime_ns, folder.name),
        reverse=True,
    )
    if not newest_first:
        raise UsageError(
            f"no run in {results}/ yet", hint="make one with `specbench run`, or name a run's folder"
        )
    chosen = next((folder for folder in newest_first if _doubt(folder) is None), None)
    if chosen is None:
        chosen = newest_first[0]
        why = f" ({_doubt(chosen)}; {results}/ holds no complete run of a model)"
    else:
        why = "" if chosen == newest_first[0] else " (newer ones are incomplete or simulated)"
    typer.echo(f"latest is {chosen}{why}", err=True)
    return chosen


def _doubt(folder: Path) -> str | None:
    """Say why a run is not what `latest` means, or return None."""
    try:
        document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        status, engine = document["status"], document["config"].get("engine")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "unreadable"
    return "simulated" if engine == "simulated" else None if status == "complete" else str(status)


def _runs(results: Path) -> list[Path]:
    return [path.parent for path in results.glob("*/run.json")]
