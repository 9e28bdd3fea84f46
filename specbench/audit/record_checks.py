"""What records of a schedule owe each other beyond the identities of METRICS.md: drafts, chunks, endings.

The identities hold for any engine. These need what an audit in process asks for besides: the drafted tokens
themselves, every round, and the ids that end an output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from specbench.records import FinishReason, RequestRecord, RoundRecord, StepRecord


def contradictions(
    steps: Sequence[StepRecord],
    rounds: Mapping[int, Sequence[RoundRecord]],
    records: Mapping[int, RequestRecord],
    eos_ids: Collection[int],
) -> list[str]:
    """Return what does not fit, as sentences that name the request or the step.

    Args:
        steps: All of a schedule.
        rounds: Of each request, in order, with their drafts recorded.
        records: Of each request.
        eos_ids: The target's, which end an output unless a request ignores them.
    """
    drafted: Counter[int] = Counter()
    for entries in rounds.values():
        for entry in entries:
            drafted[entry.step] += entry.drafted
    found = [f"step {step.step} {words}" for step in steps for words in _step(step, drafted[step.step])]
    for number, record in records.items():
        of_rounds = (w for entry in rounds.get(number, ()) for w in _round(entry))
        found += (
            f"request {number} {words}"
            for words in (*of_rounds, *_chunks(rounds.get(number, ()), record), *_ending(record, eos_ids))
        )
    return found


def _round(entry: RoundRecord) -> Iterator[str]:
    """Compare the counts of a round with the drafted tokens, where it has any."""
    tokens, parents = entry.draft_tokens, entry.draft_parents
    listed = 0 if tokens is None else len(tokens)
    if entry.drafted != listed:
        yield f"counts {entry.drafted} drafted tokens in round {entry.round}, and lists {listed}"
    elif parents is None and entry.draft_depth != entry.drafted:
        yield f"drafted a chain of {entry.drafted} and depth {entry.draft_depth} in round {entry.round}"
    if tokens is not None and entry.draft_probs is not None and len(entry.draft_probs) != listed:
        yield f"lists {listed} drafted tokens in round {entry.round}, and q of {len(entry.draft_probs)}"


def _chunks(rounds: Sequence[RoundRecord], record: RequestRecord) -> Iterator[str]:
    """Compare the chunks that a client got with what the rounds emitted."""
    emitted = tuple(entry.emitted for entry in rounds if entry.emitted)
    if rounds and emitted != record.chunk_sizes:
        yield f"got chunks of {_shown(record.chunk_sizes)} tokens; its rounds emitted {_shown(emitted)}"


def _ending(record: RequestRecord, eos_ids: Collection[int]) -> Iterator[str]:
    """Compare an output with the reason it is said to have ended for."""
    if record.error is not None or record.finish_reason in ("cancelled", "error"):
        return
    sampling, output = record.sampling, record.output_tokens
    eos = frozenset() if sampling.ignore_eos else frozenset(eos_ids)
    stops = frozenset(sampling.stop_token_ids)
    place = next((i for i, token in enumerate(output) if token in eos or token in stops), None)
    if place is not None and place < len(output) - 1:
        yield f"goes on behind token {output[place]} at {place}, which ends it"
        return
    expected: tuple[FinishReason, ...] = ("length", "context")
    if place is not None:
        expected = ("eos",) if output[place] in eos else ("stop",)
    if sampling.stop_strings:  # may end an output anywhere, and are the contracts' business
        expected += ("stop",)
    if record.finish_reason not in expected:
        yield f"finished by '{record.finish_reason}'; expected '{expected[0]}'"
    elif record.finish_reason == "length" and len(output) != sampling.max_new_tokens:
        yield f"finished by 'length' after {len(output)} tokens of {sampling.max_new_tokens}"


def _step(step: StepRecord, drafted: int) -> Iterator[str]:
    """Compare what a step sent to the target with what its rounds drafted."""
    if step.phase != "decode":
        return
    if step.tokens_in != step.batch + drafted:
        yield f"sent {step.tokens_in} tokens; expected {step.batch} rows and {drafted} drafted tokens"
    if step.kv_lookahead != drafted:
        yield f"holds {step.kv_lookahead} slots for drafts; {drafted} tokens were drafted"


def _shown(sizes: Sequence[int]) -> str:
    return " ".join(map(str, sizes[:10])) + (" …" if len(sizes) > 10 else "")
