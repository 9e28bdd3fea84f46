"""Progress on stderr: a bar on a terminal; elsewhere a line a stage, and one about every tenth of it."""

from __future__ import annotations

import sys
import time
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
        )
        self.task: Any = None
        self.name = ""
        self.total: int | None = None
        self.done = 0
        self.started = 0.0

    def __enter__(self) -> RichProgress:
        """Start showing."""
        if self.is_live:
            self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Clear the bar away."""
        if self.is_live:  # rich before 14.3 ends even a disabled bar with an empty line
            self.bars.stop()

    def stage(self, text: str, total: int | None = None) -> None:
        """Begin a stage; the one before is over."""
        if self.task is not None:
            self.bars.remove_task(self.task)
        self.name, self.total, self.done, self.started = text, total, 0, time.monotonic()
        self.task = self.bars.add_task(text, total=total)
        if not self.is_live:
            self.say(text)

    def advance(self, amount: int = 1, text: str | None = None) -> None:
        """Move the bar."""
        if self.task is not None:
            self.bars.update(self.task, advance=amount)
            if text is not None:
                self.bars.update(self.task, description=text)
        if not self.is_live and self.total:
            before, self.done = self.done, self.done + amount
            # Finer than a tenth would fill the log of a long run, coarser leave it silent for long.
            if 10 * self.done // self.total > 10 * before // self.total:
                share = 100 * self.done // self.total
                elapsed = _clock(time.monotonic() - self.started)
                self.say(f"{self.name}: {share} % ({self.done} of {self.total}), {elapsed}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    """Write a duration as `2:05` or `1:02:05`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
