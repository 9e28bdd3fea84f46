"""What the records of one cell must satisfy among themselves (identities 1 to 5 of METRICS.md).

A serving with neither steps nor rounds comes from an engine that reports only totals: its requests are
checked, and its rounds are not missed. Times that were read from two clocks (a device's and the host's) may
disagree by `PART_SLACK` of the whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from specbench.errors import IdentityViolation
from specbench.metrics import acceptance, latency
from specbench.records import CellRecords, RequestRecord, RoundRecord, Serving, StepRecord

CLOCK_SLACK_S = 2e-5
"""Seconds by which two readings of the clocks may contradict each other."""

PART_SLACK = 0.01
"""Share of a step's wall time by which the sum of its parts may exceed it."""

ROUNDING = 1e-9
"""What floating-point sums may differ by, relative to their size or to 1, whichever is larger."""


def check(cell: CellRecords) -> list[str]:
    """Return every violation as a sentence that names the request or step; an empty list if there is none."""
    found = []
    for serving in cell.servings:
        where = f"repeat {serving.repeat} unit {serving.unit}"
        found += [f"{where} {violation}" for violation in _serving_violations(serving)]
    return found + list(_cell_violations(cell))


def enforce(cell: CellRecords) -> None:
    """Raise IdentityViolation, naming the first contradictions, if the records contradict one another."""
    found = check(cell)
    if not found:
        return
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    raise IdentityViolation(
        f"the records of '{cell.key}' contradict themselves: {'; '.join(found[:3])}{more}",
        hint="this is a fault of the engine or of specbench; nothing derived from these records is shown",
    )


def joint_violations(
    joint: Sequence[float], acceptance_length: float, slack: float = ROUNDING
) -> Iterator[str]:
    """Check identity 4 on any joint acceptance, ours or an engine's, and the acceptance length beside it."""
    for position, (before, after) in enumerate(pairwise(joint), start=2):
        if after > before + slack:
            yield f"joint acceptance rises from {before:g} to {after:g} at position {position}"
    total = 1 + sum(joint)
    if abs(acceptance_length - total) > max(slack, ROUNDING * total):
        yield f"acceptance length is {acceptance_length:g}, but 1 + the sum of joint acceptance is {total:g}"


def latency_violations(ttft: float, gaps: Sequence[float], end_to_end: float) -> Iterator[str]:
    """Check the sum of identity 5 on any latencies, ours or an engine's."""
    total = ttft + sum(gaps)
    if abs(total - end_to_end) > ROUNDING * max(1.0, abs(end_to_end)):
        yield f"TTFT + ITL is {total:g} s, but the last chunk came {end_to_end:g} s after arrival"


def _serving_violations(serving: Serving) -> Iterator[str]:
    rounds_of: dict[int, list[RoundRecord]] = defaultdict(list)
    for row in serving.rounds:
        rounds_of[row.request].append(row)
    has_rounds = bool(serving.rounds or serving.steps)

    yield from _step_violations(serving)
    numbers = Counter(request.request for request in serving.requests)
    yield from (
        f"request {number} is recorded {times} times" for number, times in numbers.items() if times > 1
    )
    yield from (f"request {number} has rounds but no record" for number in rounds_of if number not in numbers)
    for request in serving.requests:
        rows = rounds_of[request.request]
        violations = [*_request_violations(request), *_chunk_violations(request)]
        if has_rounds:
            violations += _history_violations(request, rows)
        for row in rows:
            violations += (f"round {row.round} {violation}" for violation in _round_violations(row))
        yield from (f"request {request.request}: {violation}" for violation in violations)


def _step_violations(serving: Serving) -> Iterator[str]:
    rounds_in = Counter(row.step for row in serving.rounds)
    prefills_in = {row.step for row in serving.rounds if row.round == 0}
    numbers = Counter(step.step for step in serving.steps)
    yield from (f"step {number} is recorded {times} times" for number, times in numbers.items() if times > 1)
    yield from (f"step {number} has rounds but no record" for number in rounds_in if number not in numbers)
    for step in serving.steps:
        name = f"step {step.step}"
        if rounds_in[step.step] != step.batch:
            yield f"{name}: batch is {step.batch}, but it has {rounds_in[step.step]} rounds"
        if step.phase == "decode" and step.step in prefills_in:
            yield f"{name}: phase is decode, but it holds the prefill (round 0) of a request"
        yield from (f"{name}: {violation}" for violation in _duration_violations(step))


def _duration_violations(step: StepRecord) -> Iterator[str]:
    parts = {name: getattr(step, f"{name}_s") for name in ("draft", "verify", "commit", "host")}
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    slack = CLOCK_SLACK_S + PART_SLACK * abs(step.wall_s)
    for name, seconds in {"wall": step.wall_s, "forward": step.forward_s or 0.0, **known}.items():
        if seconds < -slack:
            yield f"{name}_s is {seconds:g}, a negative time"
    if sum(known.values()) > step.wall_s + slack:
        yield f"{' + '.join(known)} take {sum(known.values()):g} s, more than wall_s {step.wall_s:g}"
    if step.forward_s is not None and step.forward_s > step.wall_s + slack:
        yield f"forward_s {step.forward_s:g} is more than wall_s {step.wall_s:g}"


def _request_violations(request: RequestRecord) -> Iterator[str]:
    budget, output = request.sampling.max_new_tokens, len(request.output_tokens)
    if output > budget:
        yield f"has {output} output tokens, more than its budget of {budget}"
    if sum(request.chunk_sizes) != output:
        yield f"its chunks hold {sum(request.chunk_sizes)} tokens, its output {output}"
    if len(request.chunk_sizes) != len(request.chunk_times):
        yield f"has {len(request.chunk_sizes)} chunk sizes for {len(request.chunk_times)} chunk times"
    if any(size < 0 for size in request.chunk_sizes):
        yield "has a chunk with a negative number of tokens"


def _chunk_violations(request: RequestRecord) -> Iterator[str]:
    """Check identity 5: time runs forward from arrival to finish, and the latencies add up."""
    scheduled = () if request.first_scheduled is None else (("first scheduled", request.first_scheduled),)
    chunks = ((f"chunk {number}", time) for number, time in enumerate(request.chunk_times))
    moments = [("arrival", request.arrival), *scheduled, *chunks, ("finish", request.finished)]
    for (name, time), (next_name, next_time) in pairwise(moments):
        if next_time < time - ROUNDING:
            yield f"{next_name} at {next_time:g} s is before {name} at {time:g} s"
    if len(request.chunk_sizes) == len(request.chunk_times):
        ttft, total = latency.time_to_first_token(request), latency.end_to_end(request)
        if ttft is not None and total is not None:
            yield from latency_violations(ttft, latency.inter_token_latencies(request), total)


def _history_violations(request: RequestRecord, rows: Sequence[RoundRecord]) -> Iterator[str]:
    """Check identity 1, and that the rounds of a request are one gapless history."""
    if request.sampling.max_new_tokens == 0 and rows:
        yield f"has {len(rows)} rounds, but a budget of 0"
    ordered = sorted(rows, key=lambda row: row.round)
    numbers = [row.round for row in ordered]
    if numbers != list(range(len(numbers))):
        yield f"its rounds are numbered {numbers}; expected 0 to {len(numbers) - 1} without gaps"
    for before, after in pairwise(ordered):
        if after.step <= before.step:
            yield f"round {after.round} is in step {after.step}; expected one after step {before.step}"
        if before.ended_by != "none":
            yield f"round {after.round} follows round {before.round}, which ended it by {before.ended_by}"
    first = sum(row.emitted for row in rows if row.round == 0)
    later = sum(row.emitted for row in rows if row.round > 0)
    if later != len(request.output_tokens) - first:
        yield (
            f"its decode rounds emitted {later} tokens, but the output has {len(request.output_tokens)} "
            f"and round 0 emitted {first}"
        )


def _round_violations(row: RoundRecord) -> Iterator[str]:
    """Check identities 2 and 3 on one round."""
    if row.emitted < 0 or row.emitted > row.accepted + 1:
        yield f"emitted {row.emitted} tokens; expected 0 to {row.accepted + 1} with {row.accepted} accepted"
    elif row.ended_by == "none" and row.emitted != row.accepted + 1:
        yield f"emitted {row.emitted} tokens and ended nothing; expected {row.accepted + 1}"
    if not 0 <= row.accepted <= row.draft_depth:
        yield f"accepted {row.accepted} tokens of a draft of depth {row.draft_depth}"
    if not 0 <= row.draft_depth <= row.drafted or (row.draft_depth == 0) != (row.drafted == 0):
        yield f"has a draft of depth {row.draft_depth} in {row.drafted} tokens"
    if row.rejected and row.accepted >= row.draft_depth:
        yield f"rejected a token, but accepted the whole depth of {row.draft_depth}"
    if row.round == 0 and row.drafted != 0:
        yield f"is the prefill, but drafted {row.drafted} tokens"


def _cell_violations(cell: CellRecords) -> Iterator[str]:
    """Check what identities 1, 3 and 4 say of the whole cell."""
    rounds = [row for rows in acceptance.decode_rounds_by_request(cell) for row in rows]
    counts = acceptance.count_rounds(rounds)
    measured = [serving for serving in cell.servings if serving.rounds or serving.steps]
    output = sum(len(request.output_tokens) for serving in measured for request in serving.requests)
    first = sum(row.emitted for serving in measured for row in serving.rounds if row.round == 0)
    if counts.emitted != output - first:
        yield (
            f"the cell's decode rounds emitted {counts.emitted} tokens, but its output has {output} "
            f"and its rounds 0 emitted {first}"
        )
    length, rate = acceptance.acceptance_length(counts), acceptance.draft_acceptance_rate(counts)
    joint = acceptance.joint_acceptance(rounds)
    if length is not None:
        if not 1 <= length <= len(joint) + 1:
            yield f"the cell's acceptance length is {length:g}; expected 1 to {len(joint) + 1}"
        yield from (f"the cell's {violation}" for violation in joint_violations(joint, length))
    if rate is not None and not 0 <= rate <= 1:
        yield f"the cell's draft acceptance rate is {rate:g}; expected 0 to 1"
