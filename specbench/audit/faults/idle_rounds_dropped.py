"""Drop the rounds in which nothing was drafted.

Means over the rounds that are left are those of the good ones. Shows where drafts are missing in some steps:
n-grams, and the end of every budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.records import Schedule
from specbench.runtime.events import Event, Stepped
from specbench.runtime.loop import StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "metrics"
SHOWS: tuple[Shows, ...] = ("identities",)


class IdleRoundsDropped(StepLoop):
    """Report rounds with a draft only."""

    def serve(self, schedule: Schedule) -> Iterator[Event]:
        """Yield steps without some of their rounds."""
        for event in super().serve(schedule):
            if isinstance(event, Stepped):
                kept = tuple(entry for entry in event.rounds if entry.round == 0 or entry.drafted)
                yield replace(event, rounds=kept)
            else:
                yield event


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy leave out rounds."""
    return plant(strategy, IdleRoundsDropped)
