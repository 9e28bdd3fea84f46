"""What may be written where a command asks for a RUN."""

from __future__ import annotations

from pathlib import Path

from specbench.errors import UsageError, did_you_mean

RESULTS = Path("results")
RUN_HELP = "A run's folder or its run.json, its id in results/, or 'latest'."


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
    runs = _runs(results)
    if not runs:
        raise UsageError(
            f"no run in {results}/ yet", hint="make one with `specbench run`, or name a run's folder"
        )
    return max(runs, key=lambda folder: ((folder / "run.json").stat().st_mtime_ns, folder.name))


def _runs(results: Path) -> list[Path]:
    return [path.parent for path in results.glob("*/run.json")]
