"""An append-only log of measurements, so that a run can be stopped at any time and goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.errors import UsageError


def write(path: Path, text: str) -> None:
    """Replace a file in one piece."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


class Log:
    """What was measured so far, by case, under one set-up; the file's first line is the set-up.

    Every other line is one batch of a case, `{"case": ..., FIELD: [...]}`.
    """

    def __init__(self, path: Path, setup: Mapping[str, Any], field: str) -> None:
        """Read the file, or begin it.

        Raises:
            UsageError: it was made with another set-up, or is no such log.
        """
        self.path = path
        self.setup = setup
        self.field = field
        self.done: dict[str, list[Any]] = {}
        if not path.exists():
            write(path, json.dumps(setup) + "\n")
            return
        try:
            self._read(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{path} is no log of this tool ({error}); expected a set-up and batches, a line each",
                hint="move it away, or give another --out",
            ) from error

    def _read(self, text: str) -> None:
        head, *batches = text.splitlines(keepends=True) or [""]
        if json.loads(head) != self.setup:
            raise UsageError(
                f"{self.path} was made with {head.strip()}; expected {json.dumps(self.setup)}",
                hint="give the same options, or another --out",
            )
        whole = [line for line in batches if line.endswith("\n")]
        if len(whole) < len(batches):
            write(self.path, head + "".join(whole))  # the run was killed while writing the last line
        for line in whole:
            entry = json.loads(line)
            self.done.setdefault(entry["case"], []).extend(entry[self.field])

    def num(self, case: str) -> int:
        """Return how many entries a case has."""
        return len(self.done.get(case, ()))

    def add(self, case: str, entries: Sequence[Any]) -> None:
        """Keep one more batch of a case."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": case, self.field: list(entries)}) + "\n")
        self.done.setdefault(case, []).extend(entries)

    def furthest_behind(self, wanted: Mapping[str, int]) -> str | None:
        """Return the case with the least share done, so that an early stop leaves all with something."""
        shares = {case: self.num(case) / number for case, number in wanted.items() if number}
        case = min(shares, key=lambda name: shares[name], default=None)
        return None if case is None or shares[case] >= 1 else case
