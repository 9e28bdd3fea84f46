"""The protocol of an engine: open a strategy, serve a schedule, yield events, say what it holds.

An engine owns its loop and one monotonic clock. What it cannot report is None, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specbench.records import MemoryRecord, Schedule

if TYPE_CHECKING:
    from specbench.runtime.events import Event
    from specbench.runtime.protocols import Strategy


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can report, and what it can be asked."""

    reports_rounds: bool
    reports_phase_times: bool
    can_audit: bool
    is_simulated: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """What is known of a strategy once an engine has it open."""

    name: str
    lossless: bool
    max_draft: int


class Engine(Protocol):
    """Generates text and yields records; judges nothing."""

    capabilities: Capabilities

    def open(self, strategy: str, *, alter: Callable[[Strategy], Strategy] | None = None) -> Opened:
        """Prepare a strategy given as `name:key=value,...`; `alter` breaks it on purpose (audits)."""
        ...

    def serve(self, schedule: Schedule) -> Iterator[Event]:
        """Serve a schedule with the open strategy."""
        ...

    def cancel(self, request: int) -> None:
        """Stop a request at its next step."""
        ...

    def memory(self) -> MemoryRecord:
        """Say what the open strategy holds."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
