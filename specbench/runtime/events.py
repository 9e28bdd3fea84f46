"""What an engine yields while it serves a schedule."""

from __future__ import annotations

from dataclasses import dataclass

from specbench.records import RequestRecord, RoundRecord, StepRecord


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one request that became visible at one moment (seconds since the schedule began)."""

    request: int
    time: float
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request is over."""

    record: RequestRecord


@dataclass(frozen=True, slots=True)
class Stepped:
    """A target forward and its rounds. Arrives after the schedule: device times are read at the end."""

    step: StepRecord
    rounds: tuple[RoundRecord, ...]


Event = Chunk | Finished | Stepped
