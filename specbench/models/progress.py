"""Progress of fetching a model: one line on stderr, and only where somebody can watch it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Update = Callable[[str, int | None, int | None], None]
"""Report `(stage, done, total)`, both in bytes; None where a stage has no measure."""


def is_shown(progress: bool | None) -> bool:
    """Decide whether to draw: on a terminal, unless `progress` is False."""
    return progress is not False and sys.stderr.isatty()


@contextmanager
def show(progress: bool | None) -> Iterator[Update]:
    """Yield a function that draws a stage's progress, or does nothing where nothing is shown."""
    if not is_shown(progress):
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[size]}"),
        TimeElapsedColumn(),
    )
    # The stream itself, not `stderr=True`: `load_gguf` points sys.stderr elsewhere for a while.
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int | None, total: int | None) -> None:
            if stage not in tasks:
                for earlier in tasks.values():
                    bars.update(earlier, visible=False)
                tasks[stage] = bars.add_task(stage, total=total, size="")
            size = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if done is not None and total else ""
            bars.update(tasks[stage], completed=done, size=size)

        yield update
