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
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.commit import Committed, Limits, StopChecker, commit
from specbench.decoding.distribution import Distribution
from specbench.decoding.padding import padded
from specbench.decoding.processing import History, SamplingTensors, ancestors, process
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
    TokenLogprobs,
)
from specbench.runtime.events import Chunk, Event, Finished, Stepped
from specbench.runtime.grammar import GrammarCompiler, Matcher, unpack, window_masks
from specbench.runtime.protocols import BatchView, DraftContext, StepView, Strategy
from specbench.runtime.runner import ModelRunner, TreeWindow
from specbench.runtime.stop_strings import Decode, StopStrings
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
    stop_checker: StopChecker | None = None
    matcher: Matcher | None = None
    round: int = 0
    chunk_times: list[float] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

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


@dataclass(frozen=True, slots=True)
class Decision:
    """What verification decided for one row.

    `taken` are the accepted nodes in order and `tokens` their tokens; then comes `next_token`, recovered if
    a rejection ended the run.
    """

    taken: list[int]
    tokens: list[int]
    rejected: bool
    next_token: int


@dataclass(frozen=True, slots=True)
class _Draft:
    """What one row was offered."""

    offered: int
    depth: int
    tokens: tuple[int, ...] | None
    probs: tuple[float, ...] | None
    parents: tuple[int, ...] | None


@dataclass(slots=True)
class Window:
    """One forward of the target, from its rows to what verification needs.

    `rows` are the active rows of this forward: all of them, or the newly prefilled ones at the end, from
    `first` on. `follows` `[B, N + 1, N]` are the ancestors of every row of a tree; None for chains.
    `allowed` `[B, N + 1, V]` is what the grammars allow; None without any.
    """

    phase: Phase
    rows: list[Row]
    first: int
    proposal: Proposal
    started: float
    marks: list[Mark]
    follows: Tensor | None = None
    allowed: Tensor | None = None
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    tokens_sent: int = 0
    tokens_used: int = 0
    features: dict[int, Tensor] = field(default_factory=dict)

    @property
    def drafted(self) -> list[int]:
        """Return the offered tokens of each row."""
        return list(self.proposal.offered)


class StepLoop:
    """Serves one schedule with one strategy.

    The methods from `starts` to `describe_round` are the decisions of a step, one each: an injected fault
    is a subclass that gets one of them wrong.

    Args:
        runner: the target.
        strategy: what to decode with.
        rows: the most requests in flight.
        eos_ids: the target's end-of-sequence ids.
        decode: token ids to text; needed by requests with stop strings.
        grammars: compiles those of requests that have one.
        clock: seconds since the schedule began; waiting uses `sleep`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        strategy: Strategy,
        *,
        rows: int,
        eos_ids: Sequence[int],
        decode: Decode | None = None,
        grammars: GrammarCompiler | None = None,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.runner = runner
        self.strategy = strategy
        self.max_rows = rows
        self.eos_ids = frozenset(eos_ids)
        self.decode = decode
        self.grammars = grammars
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
        if schedule.samples > self.max_rows:
            raise UsageError(
                f"{schedule.samples} samples of a prompt are more than the {self.max_rows} rows there are",
                hint="raise the rows of the engine, or ask for fewer samples",
            )
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
        taken = 0
        while source.waiting:
            # The samples of a prompt come together, so that they can share its prefill.
            begins_group = taken % source.samples == 0
            if begins_group and len(self.active) + len(rows) + source.samples > self.max_rows:
                break
            taken += 1
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
        self._check_ids(request)
        context = min(self.runner.max_context or 1 << 40, self.runner.cache.width)
        room = context - len(request.prompt)
        if room < 0:
            raise UsageError(
                f"prompt '{request.prompt_id}' has {len(request.prompt)} tokens, more than the context of "
                f"{context}",
                hint="leave it out, or use a model with a longer context",
            )
        stop_checker = None
        if sampling.stop_strings:
            if self.decode is None:
                raise UsageError(
                    f"request {request.id} has stop strings, and this engine was given no tokenizer",
                    hint="use stop_token_ids",
                )
            stop_checker = StopStrings(
                sampling.stop_strings, self.decode, request.prompt, min_tokens=sampling.min_new_tokens
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
            stop_checker=stop_checker,
            matcher=self._matcher(request),
        )

    def _matcher(self, request: Request) -> Matcher | None:
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        if self.grammars is None:
            raise UsageError(
                f"request {request.id} has a grammar, and this engine was given no tokenizer",
                hint="leave the grammar out",
            )
        return self.grammars.matcher(grammar)

    def _check_ids(self, request: Request) -> None:
        """Refuse parameters that name tokens the model does not have."""
        vocab = self.runner.vocab
        for token in request.sampling.named_tokens:
            if token >= vocab:
                raise UsageError(
                    f"request {request.id} names token {token}; the model has {vocab} tokens",
                    hint="ids are those of the target's tokenizer, from 0",
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
        window = Window("prefill", rows, first, Proposal.empty(len(rows), runner.device), started, marks)
        window.logits, window.tokens_sent, window.tokens_used = logits, output.tokens_sent, sum(counts)
        self._constrain(window)
        return self._finish_step(window)

    @torch.inference_mode()
    def _decode(self) -> list[Event]:
        """Draft, verify and commit once for every active row."""
        runner, drafter, rows = self.runner, self.strategy.drafter, self.active
        started = self.clock()
        marks = [runner.stopwatch.mark()]
        window = Window("decode", rows, 0, self._propose(), started, marks)
        marks.append(runner.stopwatch.mark())
        self._constrain(window)
        proposal = window.proposal
        last = torch.tensor([[row.tokens[-1]] for row in rows], device=runner.device)
        if proposal.parents is not None and proposal.num:
            window.follows = ancestors(proposal.parents)
        output = runner.forward(
            torch.cat([last, proposal.tokens], 1) if proposal.num else last,
            self.starts(rows),
            [count + 1 for count in window.drafted],
            feature_layers=drafter.needs_features if drafter else (),
            tree=self.layout(window),
        )
        window.logits, window.tokens_sent, window.features = (
            output.logits,
            output.tokens_sent,
            output.features,
        )
        window.tokens_used = sum(window.drafted) + len(rows)
        return self._finish_step(window)

    def _propose(self) -> Proposal:
        """Ask the drafter, if there is one and any row may draft."""
        rows, strategy = self.active, self.strategy
        limits = self._draft_limits()
        if strategy.drafter is None or not any(limits):
            return Proposal.empty(len(rows), self.runner.device)
        matchers = [row.matcher for row in rows]
        return strategy.drafter.propose(
            DraftContext(
                [row.tokens for row in rows],
                limits,
                self.sampling,
                self.random(rows),
                prompts=[len(row.request.prompt) for row in rows],
                slots=self._room(),
                stop_below=strategy.policy.stop_below,
                matchers=matchers if any(matchers) else None,
            )
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

    def _constrain(self, window: Window) -> None:
        """Find what the grammars allow in every row, and take out the certain drafts that they forbid.

        A token that was drawn at random must stay, however hopeless: whether a position is drafted may not
        depend on its own draw. One that is certain (q = 1) is a function of the text and the draws before.
        """
        matchers = [row.matcher for row in window.rows]
        if not any(matchers):
            return
        proposal, vocab = window.proposal, self.runner.vocab
        tokens = proposal.tokens.tolist()
        parents = (
            proposal.parents.tolist()
            if proposal.parents is not None
            else [list(range(-1, proposal.num - 1))] * len(matchers)
        )
        certain = (proposal.q.prob_of(proposal.tokens) == 1).tolist()
        kept: list[list[int]] = []
        bits: list[Tensor] = []
        for row, matcher in enumerate(matchers):
            offered = proposal.offered[row]
            if matcher is None:
                kept.append(list(range(offered)))
                bits.append(torch.empty(0))
                continue
            nodes, masks = self.grammar_masks(matcher, tokens[row][:offered], parents[row][:offered])
            kept.append(_uncut(nodes, parents[row][:offered], certain[row]))
            bits.append(masks)
        if any(len(nodes) < offered for nodes, offered in zip(kept, proposal.offered, strict=True)):
            window.proposal = _cut(proposal, parents, kept)
        allowed = torch.ones(len(matchers), window.proposal.num + 1, vocab, dtype=torch.bool)
        for row, (nodes, masks) in enumerate(zip(kept, bits, strict=True)):
            if matchers[row] is not None:
                places = torch.tensor([0, *(node + 1 for node in nodes)])
                allowed[row, : len(places)] = unpack(masks[places], vocab)
        window.allowed = allowed.to(self.runner.device)

    def _finish_step(self, window: Window) -> list[Event]:
        """Verify, commit and record; the part that prefill and decode steps share."""
        rows, proposal, drafter = window.rows, window.proposal, self.strategy.drafter
        p = self.law(window)
        acceptance = self.strategy.rule.verify(p, proposal, self.random(rows, window.first))
        if window.phase == "decode":
            window.marks.append(self.runner.stopwatch.mark())
        decided = self.decide(acceptance, proposal)
        self.compact(window, decided)
        drafts = _drafts(proposal, record=self._record_drafts)
        now = self.clock()
        rounds: list[RoundRecord] = []
        events: list[Event] = []
        ended: list[tuple[int, FinishReason]] = []
        for index, (row, decision) in enumerate(zip(rows, decided, strict=True)):
            result = self.emit(row, decision)
            self._log(window, p, index, decision, result)
            rounds.append(self.describe_round(row, len(self._steps), drafts[index], decision, result))
            self._apply(row, result, now, events)
            row.round += 1
            reason = _finish_reason(result.ended_by, row)
            if row.request.id in self.cancelled:
                reason = "cancelled"
            if reason is not None:
                ended.append((window.first + index, reason))
        if drafter is not None and window.phase == "decode":
            accepted = [len(decision.taken) for decision in decided]
            drafter.commit(accepted, window.features)
            self.strategy.policy.observe(StepView([draft.depth for draft in drafts], accepted))
        # Memory as it was during the step: before requests leave.
        committed = sum(len(row.tokens) for row in self.active)
        context = max(len(row.tokens) for row in rows)
        memory = drafter.memory() if drafter is not None else None
        for index, reason in reversed(ended):
            events.append(self._leave(index, reason))
        window.marks.append(self.runner.stopwatch.mark())
        record = StepRecord(
            step=len(self._steps),
            batch=len(rounds),
            tokens_in=window.tokens_used,
            tokens_padded=window.tokens_sent - window.tokens_used,
            context_max=context,
            phase=window.phase,
            started=window.started,
            wall_s=0.0,
            draft_s=None,
            verify_s=None,
            commit_s=None,
            host_s=None,
            forward_s=None,
            dispatch="eager",
            kv_committed=committed,
            kv_lookahead=sum(window.drafted),
            kv_draft=memory.slots if memory else 0,
        )
        wall = self.clock() - window.started
        timing = _Timing(window.started, wall, window.marks, self._take_forwards())
        self._steps.append((record, tuple(rounds), timing))
        return events

    # The decisions of a step

    def starts(self, rows: Sequence[Row]) -> list[int]:
        """Return the slot of each row's last token: what was rejected lies beyond, and is overwritten."""
        return [len(row.tokens) - 1 for row in rows]

    def layout(self, window: Window) -> TreeWindow | None:
        """Return positions and visibility of the window where they are not those of a chain."""
        return TreeWindow.to_verify(window.follows) if window.follows is not None else None

    def sampling_of(self, rows: Sequence[Row]) -> SamplingTensors:
        """Return the parameters of some rows."""
        params = [row.request.sampling for row in rows]
        return SamplingTensors.of(params, self.runner.device, eos_ids=self.eos_ids)

    def random(self, rows: Sequence[Row], first: int = 0) -> RoundRandom:
        """Return the random numbers of this round: a function of request, position and round."""
        assert self.sampling is not None
        assert self._keys is not None
        numbers = torch.tensor([[row.produced, row.round] for row in rows], device=self.runner.device)
        return RoundRandom(self._keys[first:], numbers[:, 0], numbers[:, 1])

    def grammar_masks(
        self, matcher: Matcher, nodes: Sequence[int], parents: Sequence[int]
    ) -> tuple[list[int], Tensor]:
        """Return which nodes of a proposal a grammar allows, and the masks of every row."""
        return window_masks(matcher, nodes, parents)

    def history(self, window: Window, sampling: SamplingTensors) -> History | None:
        """Return what every row of the window follows, where that matters."""
        if not sampling.needs_history:
            return None
        tokens = [row.tokens for row in window.rows]
        prompts = [len(row.request.prompt) for row in window.rows]
        if window.follows is None:
            return History.of_chain(tokens, prompts, window.proposal.tokens)
        return History(tokens, prompts, window.proposal.tokens, window.follows)

    def law(self, window: Window) -> Distribution:
        """Return the target's sampling distribution of every row of the window."""
        sampling = self.sampling if window.first == 0 else self.sampling_of(window.rows)
        return process(window.logits, sampling, self.history(window, sampling), window.allowed)

    def decide(self, acceptance: Acceptance, proposal: Proposal) -> list[Decision]:
        """Read what verification decided in one device-to-host transfer."""
        num = proposal.num
        packed = torch.cat(
            [
                acceptance.accepted[:, None],
                acceptance.rejected[:, None].to(torch.int64),
                acceptance.next_token[:, None],
                acceptance.path,
                proposal.tokens,
            ],
            1,
        ).tolist()
        decisions = []
        for accepted, rejected, next_token, *rest in packed:
            taken, tokens = rest[:accepted], rest[num:]
            decisions.append(Decision(taken, [tokens[node] for node in taken], bool(rejected), next_token))
        return decisions

    def compact(self, window: Window, decided: Sequence[Decision]) -> None:
        """Move the entries of each accepted path of a tree to where a run would have put them."""
        if window.follows is None:
            return
        self.runner.cache.compact(
            [
                (index, len(row.tokens) + node, len(row.tokens) + place)
                for index, (row, decision) in enumerate(zip(window.rows, decided, strict=True))
                for place, node in enumerate(decision.taken)
                if node != place
            ]
        )

    def emit(self, row: Row, decision: Decision) -> Committed:
        """Decide what of an accepted run and its extra token reaches the output."""
        limits = Limits(row.remaining, row.eos_ids, row.stop_ids, row.stop_checker)
        return commit(decision.tokens, decision.next_token, limits)

    def logprobs(
        self, window: Window, p: Distribution, index: int, decision: Decision, tokens: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens a row emits, each from the row that gave it."""
        most = window.rows[index].request.sampling.logprobs
        assert most is not None
        places = [0, *(node + 1 for node in decision.taken)][: len(tokens)]
        return _logprobs(window.logits[index], p, index, places, tokens, most)

    def describe_round(
        self, row: Row, step: int, draft: _Draft, decision: Decision, result: Committed
    ) -> RoundRecord:
        """Record one round of a request."""
        return RoundRecord(
            step=step,
            request=row.request.id,
            round=row.round,
            drafted=draft.offered,
            draft_depth=draft.depth,
            accepted=len(decision.taken),
            rejected=decision.rejected,
            emitted=len(result.tokens),
            ended_by=result.ended_by,
            draft_tokens=draft.tokens,
            draft_probs=draft.probs,
            draft_parents=draft.parents,
        )

    # Rows

    def _log(
        self, window: Window, p: Distribution, index: int, decision: Decision, result: Committed
    ) -> None:
        row = window.rows[index]
        if row.request.sampling.logprobs is not None:
            row.logprobs += self.logprobs(window, p, index, decision, result.tokens)

    def _apply(self, row: Row, result: Committed, now: float, events: list[Event]) -> None:
        if result.tokens:
            row.tokens += result.tokens
            row.chunk_times.append(now)
            row.chunk_sizes.append(len(result.tokens))
            events.append(Chunk(row.request.id, now, tuple(result.tokens)))
        if row.matcher is not None:
            for token in result.tokens:
                row.matcher.accept(token)

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
                logprobs=tuple(row.logprobs) if row.request.sampling.logprobs is not None else None,
            )
        )

    # What belongs to the batch as a whole

    @property
    def sampling(self) -> SamplingTensors:
        """Return the parameters of the active rows; rebuilt only when rows come or go."""
        if self._sampling is None:
            device = self.runner.device
            self._sampling = self.sampling_of(self.active)
            self._keys = stream_keys([row.request.sampling.seed for row in self.active], device)
        return self._sampling

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


def _drafts(proposal: Proposal, *, record: bool) -> list[_Draft]:
    """Return what each row was offered; tokens, q and parents only if they are to be recorded."""
    parents = proposal.parents.tolist() if proposal.parents is not None else None
    record = record and proposal.num > 0
    tokens = proposal.tokens.tolist() if record else None
    probs = proposal.q.prob_of(proposal.tokens).tolist() if record else None

    def part(values: list[list[Any]] | None, row: int, count: int) -> tuple[Any, ...] | None:
        return None if values is None else tuple(values[row][:count])

    return [
        _Draft(
            offered=count,
            depth=count if parents is None else _depth(parents[row][:count]),
            tokens=part(tokens, row, count),
            probs=part(probs, row, count),
            parents=part(parents, row, count) if record else None,
        )
        for row, count in enumerate(proposal.offered)
    ]


def _depth(parents: Sequence[int]) -> int:
    """Return the longest path of a tree."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def _uncut(allowed: Sequence[int], parents: Sequence[int], certain: Sequence[bool]) -> list[int]:
    """Return the nodes that stay: all but certain ones that a grammar forbids, and what hangs under those."""
    fine = {-1, *allowed}
    cut: set[int] = set()
    for node, parent in enumerate(parents):
        if parent in cut or (node not in fine and parent in fine and certain[node]):
            cut.add(node)
    return [node for node in range(len(parents)) if node not in cut]


def _cut(proposal: Proposal, parents: list[list[int]], kept: list[list[int]]) -> Proposal:
    """Return a proposal with the kept nodes only; with a node its descendants go."""
    device, counts = proposal.tokens.device, [len(nodes) for nodes in kept]
    if not any(counts):
        return Proposal.empty(len(kept), device)
    places = padded(kept, device)
    tokens, q = proposal.tokens.gather(1, places), proposal.q
    if q.probs is not None:
        law = Distribution.dense(q.probs.gather(1, places[..., None].expand(-1, -1, q.probs.shape[-1])))
    else:
        law = Distribution.point(tokens)
    if proposal.parents is None:
        return Proposal.chains(tokens, counts, law)
    renamed = [
        [nodes.index(parent) if (parent := parents[row][node]) >= 0 else -1 for node in nodes]
        for row, nodes in enumerate(kept)
    ]
    return Proposal.trees(tokens, padded(renamed, device), counts, law)


def _logprobs(
    logits: Tensor, p: Distribution, index: int, places: list[int], tokens: Sequence[int], most: int
) -> list[TokenLogprobs]:
    """Return the log-probabilities of tokens emitted by rows `places` of one request's window `[R, V]`."""
    raw = logits[places].float().log_softmax(-1)
    dense = p.to_dense(logits.shape[-1])[index, places]
    processed = dense.log()

    def top(values: Tensor) -> list[tuple[tuple[int, float], ...]]:
        best = values.topk(min(most, values.shape[-1]), dim=-1)
        return [
            tuple((token, value) for token, value in zip(ids, found, strict=True) if value > -torch.inf)
            for ids, found in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    chosen = torch.tensor(list(tokens), device=logits.device)[:, None]
    own = torch.cat([raw.gather(1, chosen), processed.gather(1, chosen)], 1).tolist()
    return [
        TokenLogprobs(of_raw, of_processed, top_raw, top_processed)
        for (of_raw, of_processed), top_raw, top_processed in zip(own, top(raw), top(processed), strict=True)
    ]


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
        self.samples = schedule.samples
        ordered = schedule.requests
        if self.concurrency is None:
            ordered = tuple(sorted(ordered, key=lambda request: request.arrival))
        self.pending = deque(ordered)
        self.waiting: deque[tuple[Request, float]] = deque()

    def release(self, now: float, *, in_flight: int) -> None:
        """Move requests that have arrived by `now` to the waiting line."""
        if self.concurrency is not None:
            requests = self.concurrency * self.samples - in_flight - len(self.waiting)
            for request in list(islice(self.pending, max(0, requests) // self.samples * self.samples)):
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
