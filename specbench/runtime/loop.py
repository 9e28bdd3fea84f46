"""The step loop: admit, prefill, draft, verify, commit, for a batch whose rows advance at their own pace.

Ordinary decoding is speculation with an empty draft, so every strategy runs through the same code and the
comparison is like for like. Round 0 of a request is its prefill: nothing drafted, one token emitted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from specbench.decoding.commit import Committed, Limits, commit
from specbench.decoding.padding import padded
from specbench.decoding.processing import SamplingTensors, process
from specbench.decoding.random_numbers import RoundRandom, stream_keys
from specbench.decoding.verification import Acceptance, Proposal
from specbench.errors import UsageError
from specbench.records import (
    EndedBy,
    FinishReason,
    Phase,
    Request,
    RequestRecord,
    RoundRecord,
    Schedule,
    StepRecord,
)
from specbench.runtime.events import Chunk, Event, Finished, Stepped
from specbench.runtime.protocols import BatchView, DraftContext, StepView, Strategy
from specbench.runtime.runner import ModelRunner
from specbench.runtime.stopwatch import Mark, Stopwatch

PREFILL_TOKENS = 8192
"""The most padded prompt tokens in one prefill forward: bounds the memory of its activations."""


@dataclass(slots=True)
class Row:
    """A request in flight. Its last token is not in the cache yet: it opens the next forward."""

    request: Request
    arrival: float
    first_scheduled: float
    tokens: list[int]
    limit: int
    limited_by_context: bool
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    round: int = 0
    chunk_times: list[float] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)

    @property
    def produced(self) -> int:
        """Return the number of output tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Return the tokens of budget left."""
        return self.limit - self.produced


@dataclass(slots=True)
class _Timing:
    """The marks of one step, read after the run."""

    started: float
    wall_s: float
    marks: list[Mark]
    forwards: list[tuple[Stopwatch, Mark, Mark]]


class StepLoop:
    """Serves one schedule with one strategy.

    Args:
        runner: the target.
        strategy: what to decode with.
        rows: the most requests in flight.
        eos_ids: the target's end-of-sequence ids.
        clock: seconds since the schedule began; waiting uses `sleep`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        strategy: Strategy,
        *,
        rows: int,
        eos_ids: Sequence[int],
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.runner = runner
        self.strategy = strategy
        self.max_rows = rows
        self.eos_ids = frozenset(eos_ids)
        origin = time.perf_counter()
        self.clock = clock or (lambda: time.perf_counter() - origin)
        self.sleep = sleep
        self.active: list[Row] = []
        self.cancelled: set[int] = set()
        self._sampling: SamplingTensors | None = None
        self._keys: Tensor | None = None
        self._steps: list[tuple[StepRecord, tuple[RoundRecord, ...], _Timing]] = []
        self._record_drafts = False

    def serve(self, schedule: Schedule) -> Iterator[Event]:
        """Run a schedule to its end, yielding events as they happen and step records last."""
        self._record_drafts = schedule.record_drafts
        self.strategy.policy.reset()
        source = _Arrivals(schedule)
        try:
            while True:
                now = self.clock()
                source.release(now, in_flight=len(self.active))
                admitted, instant = self._admit(source, now)
                yield from instant
                if admitted:
                    yield from self._prefill(admitted, share=schedule.share_prefill)
                elif self.active:
                    yield from self._decode()
                elif instant:
                    continue
                elif (wait := source.next_arrival(now)) is not None:
                    self.sleep(wait)
                else:
                    break
        finally:
            if self.strategy.drafter is not None and self.active:
                self.strategy.drafter.release(range(len(self.active)))
            self.active.clear()
        yield from self._timed_steps()

    # Admission

    def _admit(self, source: _Arrivals, now: float) -> tuple[list[Row], list[Event]]:
        """Take waiting requests into free rows; those with nothing to do finish at once."""
        rows: list[Row] = []
        events: list[Event] = []
        while source.waiting and len(self.active) + len(rows) < self.max_rows:
            request, arrival = source.waiting.popleft()
            row = self._open(request, arrival, now)
            if request.id in self.cancelled:
                events.append(self._close(row, "cancelled"))
            elif row.limit == 0:
                events.append(self._close(row, "context" if row.limited_by_context else "length"))
            else:
                rows.append(row)
        return rows, events

    def _open(self, request: Request, arrival: float, now: float) -> Row:
        if not request.prompt:
            raise UsageError(f"request {request.id} has an empty prompt", hint="every prompt needs a token")
        sampling = request.sampling
        context = min(self.runner.max_context or 1 << 40, self.runner.cache.width)
        room = context - len(request.prompt)
        if room < 0:
            raise UsageError(
                f"prompt '{request.prompt_id}' has {len(request.prompt)} tokens, more than the context of "
                f"{context}",
                hint="leave it out, or use a model with a longer context",
            )
        return Row(
            request=request,
            arrival=arrival,
            first_scheduled=now,
            tokens=list(request.prompt),
            limit=min(sampling.max_new_tokens, room),
            limited_by_context=room < sampling.max_new_tokens,
            eos_ids=frozenset() if sampling.ignore_eos else self.eos_ids,
            stop_ids=frozenset(sampling.stop_token_ids),
        )

    # Steps

    def _prefill(self, admitted: list[Row], *, share: bool) -> Iterator[Event]:
        """Prefill new rows, as many per forward as PREFILL_TOKENS allows, and emit each one's first token."""
        queue = deque(admitted)
        while queue:
            unique: dict[object, list[Row]] = {}
            longest = 0
            while queue:
                prompt = queue[0].request.prompt
                key = prompt if share else len(unique)
                width = max(longest, len(prompt))
                if unique and key not in unique and width * (len(unique) + 1) > PREFILL_TOKENS:
                    break
                longest = width
                unique.setdefault(key, []).append(queue.popleft())
            yield from self._prefill_batch(list(unique.values()))

    @torch.inference_mode()
    def _prefill_batch(self, groups: list[list[Row]]) -> list[Event]:
        """Prefill one prompt per group; the other rows of a group copy its slots."""
        runner, drafter = self.runner, self.strategy.drafter
        first = len(self.active)
        # The prefilled row of each group comes first, then the copies.
        heads = [group[0] for group in groups]
        copies = [(index, row) for index, group in enumerate(groups) for row in group[1:]]
        rows = heads + [row for _, row in copies]
        started = self.clock()
        marks = [runner.stopwatch.mark()]
        counts = [len(row.tokens) for row in heads]
        output = runner.forward(
            padded([row.tokens for row in heads], runner.device),
            [0] * len(heads),
            counts,
            first_row=first,
            keep=[count - 1 for count in counts],
            feature_layers=drafter.needs_features if drafter else (),
        )
        logits = output.logits
        verify_end = runner.stopwatch.mark()
        if drafter is not None:
            drafter.prefill(first, [row.tokens for row in heads], output.features)
        for index in range(len(groups)):
            targets = [first + len(heads) + i for i, (head, _) in enumerate(copies) if head == index]
            if targets:
                runner.cache.copy_row(first + index, targets, counts[index])
                if drafter is not None:
                    drafter.fork(first + index, targets)
        if copies:
            order = [*range(len(heads)), *(head for head, _ in copies)]
            logits = logits[torch.tensor(order, device=runner.device)]
        draft_end = runner.stopwatch.mark()
        # Time goes draft, verify, commit in a step record, whatever the order here.
        marks += [verify_end, draft_end]
        self.active += rows
        self._sampling = None
        proposal = Proposal.empty(len(rows), runner.device)
        return self._finish_step(
            rows,
            proposal,
            logits,
            "prefill",
            started,
            marks,
            [0] * len(rows),
            output.tokens_sent,
            sum(counts),
        )

    @torch.inference_mode()
    def _decode(self) -> list[Event]:
        """Draft, verify and commit once for every active row."""
        runner, strategy, rows = self.runner, self.strategy, self.active
        started = self.clock()
        marks = [runner.stopwatch.mark()]
        limits = self._draft_limits()
        if strategy.drafter is not None and any(limits):
            context = DraftContext(
                [row.tokens for row in rows],
                limits,
                self.sampling,
                self._random(rows),
                slots=self._room(),
                stop_below=strategy.policy.stop_below,
            )
            proposal = strategy.drafter.propose(context)
        else:
            proposal = Proposal.empty(len(rows), runner.device)
        marks.append(runner.stopwatch.mark())
        last = torch.tensor([[row.tokens[-1]] for row in rows], device=runner.device)
        tokens = torch.cat([last, proposal.tokens], 1) if proposal.num else last
        drafted = list(proposal.offered)
        output = runner.forward(
            tokens,
            [len(row.tokens) - 1 for row in rows],
            [count + 1 for count in drafted],
            feature_layers=strategy.drafter.needs_features if strategy.drafter else (),
        )
        return self._finish_step(
            rows,
            proposal,
            output.logits,
            "decode",
            started,
            marks,
            drafted,
            output.tokens_sent,
            sum(drafted) + len(rows),
            output.features,
        )

    def _draft_limits(self) -> list[int]:
        """Ask the policy for draft lengths, then leave room for the extra token and for the context."""
        if self.strategy.drafter is None:
            return [0] * len(self.active)
        most_tokens = self._room()
        room = [min(row.remaining - 1, most) for row, most in zip(self.active, most_tokens, strict=True)]
        free = self.max_rows * self.runner.cache.width - sum(len(row.tokens) for row in self.active)
        view = BatchView(
            [len(row.tokens) for row in self.active], [row.remaining for row in self.active], free
        )
        wanted = self.strategy.policy.choose(view)
        return [max(0, min(k, most)) for k, most in zip(wanted, room, strict=True)]

    def _room(self) -> list[int]:
        """Return how many slots each row has left for draft tokens."""
        width = self.runner.cache.width
        if self.runner.max_context is not None:
            width = min(width, self.runner.max_context)
        return [width - len(row.tokens) for row in self.active]

    def _finish_step(
        self,
        rows: list[Row],
        proposal: Proposal,
        logits: Tensor,
        phase: Phase,
        started: float,
        marks: list[Mark],
        drafted: list[int],
        tokens_in: int,
        tokens_used: int,
        features: dict[int, Tensor] | None = None,
    ) -> list[Event]:
        """Verify, commit and record; the part that prefill and decode steps share.

        `rows` are the active rows of this forward: all of them, or the newly prefilled ones at the end.
        """
        stopwatch = self.runner.stopwatch
        first = len(self.active) - len(rows)
        sampling = (
            self.sampling
            if first == 0
            else SamplingTensors.of([row.request.sampling for row in rows], self.runner.device)
        )
        p = process(logits, sampling)
        acceptance = self.strategy.rule.verify(p, proposal, self._random(rows, first))
        if phase == "decode":
            marks.append(stopwatch.mark())
        decided = _read(acceptance, proposal)
        lookahead = sum(drafted)
        record_drafts = self._record_drafts and proposal.num > 0
        probs = proposal.q.prob_of(proposal.tokens).tolist() if record_drafts else None
        now = self.clock()
        rounds: list[RoundRecord] = []
        events: list[Event] = []
        ended: list[tuple[int, FinishReason]] = []
        accepted_counts: list[int] = []
        step = len(self._steps)
        for index, row in enumerate(rows):
            accepted, rejected, next_token, drafts = decided[index]
            result = commit(drafts[:accepted], next_token, Limits(row.remaining, row.eos_ids, row.stop_ids))
            self._apply(row, result, now, events)
            accepted_counts.append(accepted)
            kept = tuple(drafts[: drafted[index]])
            rounds.append(
                RoundRecord(
                    step=step,
                    request=row.request.id,
                    round=row.round,
                    drafted=drafted[index],
                    draft_depth=drafted[index],
                    accepted=accepted,
                    rejected=rejected,
                    emitted=len(result.tokens),
                    ended_by=result.ended_by,
                    draft_tokens=kept if record_drafts else None,
                    draft_probs=tuple(probs[index][: len(kept)]) if probs is not None else None,
                )
            )
            row.round += 1
            reason = _finish_reason(result.ended_by, row)
            if row.request.id in self.cancelled:
                reason = "cancelled"
            if reason is not None:
                ended.append((first + index, reason))
        drafter = self.strategy.drafter
        if drafter is not None and phase == "decode":
            drafter.commit(accepted_counts, features or {})
            self.strategy.policy.observe(StepView(drafted, accepted_counts))
        committed = sum(len(row.tokens) for row in self.active)
        context = max(len(row.tokens) for row in rows)
        memory = drafter.memory() if drafter is not None else None
        for index, reason in reversed(ended):
            events.append(self._leave(index, reason))
        marks.append(stopwatch.mark())
        record = StepRecord(
            step=step,
            batch=len(rounds),
            tokens_in=tokens_used,
            tokens_padded=tokens_in - tokens_used,
            context_max=context,
            phase=phase,
            started=started,
            wall_s=0.0,
            draft_s=None,
            verify_s=None,
            commit_s=None,
            host_s=None,
            forward_s=None,
            dispatch="eager",
            kv_committed=committed,
            kv_lookahead=lookahead,
            kv_draft=memory.slots if memory else 0,
        )
        timing = _Timing(started, self.clock() - started, marks, self._take_forwards())
        self._steps.append((record, tuple(rounds), timing))
        return events

    def _apply(self, row: Row, result: Committed, now: float, events: list[Event]) -> None:
        if result.tokens:
            row.tokens += result.tokens
            row.chunk_times.append(now)
            row.chunk_sizes.append(len(result.tokens))
            events.append(Chunk(row.request.id, now, tuple(result.tokens)))

    def _leave(self, index: int, reason: FinishReason) -> Finished:
        """Take a row out; the last row moves into the gap, so that active rows stay dense."""
        row = self.active[index]
        last = len(self.active) - 1
        drafter = self.strategy.drafter
        if index != last:
            self.runner.cache.copy_row(last, [index], len(self.active[last].tokens) - 1)
            if drafter is not None:
                drafter.fork(last, [index])
            self.active[index] = self.active[last]
        if drafter is not None:
            drafter.release([last])
        self.active.pop()
        self._sampling = None
        return self._close(row, reason)

    def _close(self, row: Row, reason: FinishReason) -> Finished:
        return Finished(
            RequestRecord(
                request=row.request.id,
                prompt_id=row.request.prompt_id,
                prompt_tokens=row.request.prompt,
                output_tokens=tuple(row.tokens[len(row.request.prompt) :]),
                sampling=row.request.sampling,
                arrival=row.arrival,
                first_scheduled=row.first_scheduled,
                chunk_times=tuple(row.chunk_times),
                chunk_sizes=tuple(row.chunk_sizes),
                finished=self.clock(),
                finish_reason=reason,
            )
        )

    # What belongs to the batch as a whole

    @property
    def sampling(self) -> SamplingTensors:
        """Return the parameters of the active rows; rebuilt only when rows come or go."""
        if self._sampling is None:
            device = self.runner.device
            self._sampling = SamplingTensors.of([row.request.sampling for row in self.active], device)
            self._keys = stream_keys([row.request.sampling.seed for row in self.active], device)
        return self._sampling

    def _random(self, rows: list[Row], first: int = 0) -> RoundRandom:
        assert self.sampling is not None
        assert self._keys is not None
        device = self.runner.device
        numbers = torch.tensor([[row.produced, row.round] for row in rows], device=device)
        return RoundRandom(self._keys[first:], numbers[:, 0], numbers[:, 1])

    # Times

    def _take_forwards(self) -> list[tuple[Stopwatch, Mark, Mark]]:
        """Collect the marks of the model forwards of this step, target and draft."""
        taken = []
        drafter = self.strategy.drafter
        for runner in (self.runner, *(drafter.runners if drafter is not None else ())):
            taken += [(runner.stopwatch, begin, end) for begin, end in runner.forwards]
            runner.forwards = []
        return taken

    def _timed_steps(self) -> Iterator[Stepped]:
        """Read the marks of every step, now that reading them stalls nothing."""
        watch = self.runner.stopwatch
        watch.finish()
        for record, rounds, timing in self._steps:
            if record.phase == "prefill":
                begin, verify_end, draft_end, end = timing.marks
                verify, draft = watch.seconds(begin, verify_end), watch.seconds(verify_end, draft_end)
                commit_s = watch.seconds(draft_end, end)
            else:
                begin, draft_end, verify_end, end = timing.marks
                draft, verify = watch.seconds(begin, draft_end), watch.seconds(draft_end, verify_end)
                commit_s = watch.seconds(verify_end, end)
            if self.strategy.drafter is None:  # what passed before the forward is then no phase of its own
                draft = 0.0
            forward = sum(watch.seconds(begin, end) for watch, begin, end in timing.forwards)
            yield Stepped(
                replace(
                    record,
                    wall_s=timing.wall_s,
                    draft_s=draft if self.strategy.drafter is not None else None,
                    verify_s=verify,
                    commit_s=commit_s,
                    host_s=max(0.0, timing.wall_s - draft - verify - commit_s),
                    forward_s=forward,
                ),
                rounds,
            )
        self._steps = []


def _read(acceptance: Acceptance, proposal: Proposal) -> list[tuple[int, bool, int, list[int]]]:
    """Read accepted counts, rejections, next tokens and draft tokens in one device-to-host transfer."""
    packed = torch.cat(
        [
            acceptance.accepted[:, None],
            acceptance.rejected[:, None].to(torch.int64),
            acceptance.next_token[:, None],
            proposal.tokens,
        ],
        1,
    ).tolist()
    return [(row[0], bool(row[1]), row[2], row[3:]) for row in packed]


def _finish_reason(ended_by: EndedBy, row: Row) -> FinishReason | None:
    if ended_by == "none":
        return None
    if ended_by == "budget":
        return "context" if row.limited_by_context else "length"
    return ended_by


class _Arrivals:
    """Turns a schedule into waiting requests: by the clock, or as clients of a closed loop come free."""

    def __init__(self, schedule: Schedule) -> None:
        self.concurrency = schedule.concurrency
        ordered = schedule.requests
        if self.concurrency is None:
            ordered = tuple(sorted(ordered, key=lambda request: request.arrival))
        self.pending = deque(ordered)
        self.waiting: deque[tuple[Request, float]] = deque()

    def release(self, now: float, *, in_flight: int) -> None:
        """Move requests that have arrived by `now` to the waiting line."""
        if self.concurrency is not None:
            clients = self.concurrency - in_flight - len(self.waiting)
            for request in list(islice(self.pending, max(0, clients))):
                self.pending.popleft()
                self.waiting.append((request, now))
            return
        while self.pending and self.pending[0].arrival <= now:
            request = self.pending.popleft()
            self.waiting.append((request, request.arrival))

    def next_arrival(self, now: float) -> float | None:
        """Return the seconds until the next arrival, or None if nobody else comes."""
        if not self.pending:
            return None
        return max(0.0, self.pending[0].arrival - now)
