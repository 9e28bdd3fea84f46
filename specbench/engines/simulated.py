"""An engine that runs no model: a scripted clock and scripted acceptance, for tests and what-if tables.

Every figure follows from the options, so whatever a table shows can be checked by hand. Draft token i of
a round is accepted while a counter-based number stays below `alpha`; the clock moves by the given costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbench import registry
from specbench.engines.base import Capabilities, Opened
from specbench.records import (
    EndedBy,
    FinishReason,
    MemoryRecord,
    Phase,
    Request,
    RequestRecord,
    RoundRecord,
    Schedule,
    StepRecord,
)
from specbench.runtime.events import Chunk, Event, Finished, Stepped

if TYPE_CHECKING:
    from specbench.runtime.protocols import Strategy


@dataclass(frozen=True, slots=True)
class Options:
    """Milliseconds of an ordinary step, a drafted token and a verification; `alpha`: acceptance per token.

    `row_ms` is what each further request in the batch adds to a step.
    """

    target_ms: float = 8.0
    draft_ms: float = 1.0
    verify_ms: float = 9.0
    row_ms: float = 0.0
    alpha: float = 0.8
    rows: int = 32

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated."""
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha}; expected between 0 and 1")
        if min(self.target_ms, self.draft_ms, self.verify_ms, self.row_ms) < 0 or self.rows < 1:
            raise ValueError("costs are 0 or more, rows at least 1")


@dataclass(slots=True)
class _Row:
    request: Request
    arrival: float
    scheduled: float
    output: list[int]
    times: list[float]
    sizes: list[int]
    round: int = 0


class SimulatedEngine:
    """Plays schedules on a scripted clock."""

    capabilities = Capabilities(
        reports_rounds=True, reports_phase_times=True, can_audit=False, is_simulated=True
    )

    def __init__(self, options: Options) -> None:
        self.options = options
        self.draft_length = 0
        self.cancelled: set[int] = set()

    def open(self, strategy: str, *, alter: Callable[[Strategy], Strategy] | None = None) -> Opened:
        """Read the draft length of a strategy; nothing is loaded."""
        del alter
        # A strategy that drafts has an option k; raises, with the near miss, where something is unknown.
        self.draft_length = getattr(registry.options("strategy", registry.parse(strategy)), "k", 0)
        return Opened(strategy, True, self.draft_length)

    def cancel(self, request: int) -> None:
        """Stop a request at its next step."""
        self.cancelled.add(request)

    def memory(self) -> MemoryRecord:
        """Report nothing: nothing is held."""
        return MemoryRecord()

    def close(self) -> None:
        """Nothing to free."""

    def serve(self, schedule: Schedule) -> Iterator[Event]:
        """Play a schedule."""
        self.cancelled = set()
        return self._play(schedule)

    def _play(self, schedule: Schedule) -> Iterator[Event]:
        o = self.options
        pending = list(schedule.requests)
        if schedule.concurrency is None:
            pending.sort(key=lambda request: request.arrival)
        active: list[_Row] = []
        now, step = 0.0, 0
        steps: list[Stepped] = []
        while pending or active:
            new: list[_Row] = []
            limit = min(o.rows, (schedule.concurrency or o.rows) * schedule.samples)
            while pending and len(active) + len(new) < limit:
                closed = schedule.concurrency is not None
                if not closed and pending[0].arrival > now:
                    break
                request = pending.pop(0)
                row = _Row(request, now if closed else request.arrival, now, [], [], [])
                if (reason := self._reason(row)) is None:
                    new.append(row)
                else:
                    yield Finished(self._record(row, now, reason))
            if not new and not active:
                now = pending[0].arrival if pending else now
                continue
            batch = new or active
            phase: Phase = "prefill" if new else "decode"
            started = now
            drafted = [0 if new else self._room(row) for row in batch]
            draft_s = max(drafted) * o.draft_ms / 1000
            verify_s = (o.verify_ms if max(drafted) else o.target_ms) / 1000
            verify_s += (len(batch) - 1) * o.row_ms / 1000
            now += draft_s + verify_s
            rounds, events = [], []
            for row, k in zip(list(batch), drafted, strict=True):
                accepted = self._accepted(row, k)
                most = row.request.sampling.max_new_tokens - len(row.output)
                emitted = min(accepted + 1, most)
                ended: EndedBy = "budget" if emitted == most else "none"
                tokens = tuple(range(len(row.output), len(row.output) + emitted))
                row.output += tokens
                row.times.append(now)
                row.sizes.append(emitted)
                events.append(Chunk(row.request.id, now, tokens))
                rounds.append(
                    RoundRecord(step, row.request.id, row.round, k, k, accepted, accepted < k, emitted, ended)
                )
                row.round += 1
            done = {row.request.id: reason for row in batch if (reason := self._reason(row))}
            leaving = [row for row in batch if row.request.id in done]
            active = [row for row in (*active, *new) if row.request.id not in done]
            context = max(len(row.request.prompt) + len(row.output) for row in batch)
            held = sum(len(row.request.prompt) + len(row.output) for row in (*active, *leaving))
            record = StepRecord(
                step, len(rounds), sum(drafted) + len(rounds), 0, context, phase, started,
                now - started, draft_s if self.draft_length else None, verify_s, 0.0, 0.0,
                now - started, "eager", held, sum(drafted), 0,
            )  # fmt: skip
            steps.append(Stepped(record, tuple(rounds)))
            step += 1
            yield from events
            for row in leaving:
                yield Finished(self._record(row, now, done[row.request.id]))
        yield from steps

    def _room(self, row: _Row) -> int:
        return max(0, min(self.draft_length, row.request.sampling.max_new_tokens - len(row.output) - 1))

    def _accepted(self, row: _Row, drafted: int) -> int:
        for i in range(drafted):
            key = f"{row.request.sampling.seed}/{row.round}/{i}".encode()
            number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64
            if number >= self.options.alpha:
                return i
        return drafted

    def _reason(self, row: _Row) -> FinishReason | None:
        if row.request.id in self.cancelled:
            return "cancelled"
        return "length" if len(row.output) >= row.request.sampling.max_new_tokens else None

    def _record(self, row: _Row, now: float, reason: FinishReason) -> RequestRecord:
        return RequestRecord(
            row.request.id,
            row.request.prompt_id,
            row.request.prompt,
            tuple(row.output),
            row.request.sampling,
            row.arrival,
            row.scheduled,
            tuple(row.times),
            tuple(row.sizes),
            now,
            reason,
        )
