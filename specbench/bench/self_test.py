"""Carrying out self-tests: audits in worker processes, each kept as it is reached, so that a rerun goes on.

The file holds one line per audit, by case and seed. It says what software the results are of, and
takes no results of another: one row of the table is to mean one thing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import specbench
from specbench import environment
from specbench.bench import workers
from specbench.bench.loading import Progress, check_writable
from specbench.bench.store import rebuild, replace_file
from specbench.errors import UsageError
from specbench.records import SCHEMA_VERSION, read_document

if TYPE_CHECKING:
    from specbench.audit.self_test import Case, Outcome, Result

KIND = "self-test"
WITHOUT_EFFECT = ("bench", "cli", "doctor", "economics", "gate", "report", "workloads")
"""Parts of the package that no audit of a case runs through; the others' sources are results' software."""
ANOTHER = "name another file, or move that one away to begin again"


class Kept:
    """The results of a self-test by case and seed; with a path, also in that file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.results: dict[tuple[str, int], Result] = {}
        if path is None:
            return
        self.environment = environment.fingerprint()
        self.software = {**_mapping(self.environment["versions"]), "sources": _sources()}
        check_writable(path.parent)
        if path.exists():
            self._read(path)

    def add(self, result: Result) -> None:
        """Keep one more, on disk before this returns."""
        self.results[result.case, result.seed] = result
        if self.path is not None:
            self._write(self.path)

    def of(self, case: Case) -> list[Result]:
        """Return what there is of a case, by seed."""
        found = [result for (name, _), result in self.results.items() if name == case.name]
        return sorted(found, key=lambda result: result.seed)

    def _read(self, path: Path) -> None:
        from specbench.audit.self_test import Result

        stored = read_document(path, KIND, kind=KIND, remedy=ANOTHER)
        try:
            software = _mapping(stored["software"])
            results = [rebuild(Result, entry, "results") for entry in stored["results"]]
        except (KeyError, TypeError, ValueError) as problem:
            raise UsageError(f"{KIND} {path} is damaged: {problem}", hint=ANOTHER) from None
        differing = [
            name for name in {**software, **self.software} if software.get(name) != self.software.get(name)
        ]
        if differing:
            raise UsageError(
                f"{path} holds results of other software; it differs in {', '.join(differing)}", hint=ANOTHER
            )
        self.results = {(result.case, result.seed): result for result in results}

    def _write(self, path: Path) -> None:
        head = {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "software": self.software,
            "environment": self.environment,
        }
        opened = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
        ordered = sorted(self.results.values(), key=lambda result: (result.case, result.seed))
        lines = ",\n  ".join(json.dumps(asdict(result)) for result in ordered)
        replace_file(path, f'{opened},\n "results": [\n  {lines}\n ]\n}}\n'.encode())


def run(
    chosen: Sequence[Case], *, seeds: int, num_workers: int, output: Path | None, progress: Progress
) -> list[Outcome]:
    """Audit the chosen cases under seeds 0 to `seeds` - 1, but for what `output` holds already.

    Returns the outcomes of all that is kept, in the order of `cases`: more than was asked for, where `output`
    held more.

    Raises:
        UsageError: `output` cannot be written, or holds something else or other software's results.
        NotMeasured: a worker died; what was done is kept.
    """
    from specbench.audit.self_test import Bench, Job, cases, outcome

    kept = Kept(output)
    jobs = [Job(case, seed) for case in chosen for seed in range(seeds)]
    missing = [job for job in jobs if (job.case.name, job.seed) not in kept.results]
    progress.stage(KIND, total=len(jobs))
    progress.advance(len(jobs) - len(missing))
    waiting = list(dict.fromkeys(job.case.name for job in missing))
    by_name = {case.name: case for case in chosen}
    # `closing` ends the workers at once, whatever happens here.
    with contextlib.closing(workers.carry_out(Bench, missing, num_workers)) as results:
        for job, result in results:
            kept.add(result)
            progress.advance(1, f"{KIND}: {job}")
            while waiting and all((waiting[0], seed) in kept.results for seed in range(seeds)):
                case = by_name[waiting.pop(0)]
                progress.say(said(outcome(case, kept.of(case))))
    return [outcome(case, kept.of(case)) for case in cases() if kept.of(case)]


def said(outcome: Outcome) -> str:
    """Say in a line what became of a case."""
    if not outcome.caught:
        found = "no alarm" if outcome.seeds == 1 else f"no alarm in {outcome.seeds}"
    else:
        found = f"caught {outcome.caught} of {outcome.seeds} by {', '.join(outcome.by)}"
    wrong = "" if outcome.is_right else ", MISSED" if outcome.expected == "caught" else ", ACCUSED WRONGLY"
    return f"{outcome.case}: {found}{wrong}"


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.40}; expected an object")
    return value


def _sources() -> str:
    """Return a hash of the sources that an audit runs through: the version does not tell commits apart."""
    root = Path(specbench.__file__).parent
    parts = (path.relative_to(root) for path in sorted(root.rglob("*.py")))
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        if part.parts[0] not in WITHOUT_EFFECT:
            found.update(f"{part.as_posix()}\n".encode() + (root / part).read_bytes())
    return found.hexdigest()
