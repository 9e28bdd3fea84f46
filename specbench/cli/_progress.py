"""Progress on stderr: a bar on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class RichProgress:
    """Shows the stages of a run; see `specbench.bench.run.Progress`."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.is_live = sys.stderr.isatty()
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            # A redraw costs about a millisecond of one core: seldom enough not to be measured.
            refresh_per_second=2,
            disable=not self.is_live,
        )
        self.task: Any = None
        self.name = ""

    def __enter__(self) -> RichProgress:
        """Start showing."""
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Clear the bar away."""
        self.bars.stop()

    def stage(self, text: str, total: int | None = None) -> None:
        """Begin a stage; the one before is over."""
        if self.task is not None:
            self.bars.remove_task(self.task)
        self.name = text
        self.task = self.bars.add_task(text, total=total)
        if not self.is_live:
            self.console.print(text)

    def advance(self, amount: int = 1, text: str | None = None) -> None:
        """Move the bar."""
        if self.task is not None:
            self.bars.update(self.task, advance=amount)
            if text is not None:
                self.bars.update(self.task, description=text)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text)
