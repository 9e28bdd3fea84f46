"""Every figure that comes from rounds: how many tokens a step gave, and which of the drafted ones were kept.

All of them are over decode rounds (round 0, the prefill, is left out).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specbench.records import CellRecords, RoundRecord


@dataclass(frozen=True, slots=True)
class RoundCounts:
    """The sums every acceptance figure is a ratio of.

    `tested` counts the draft tokens verification ruled on: those accepted, and one where it rejected.
    `draft_depth` is the sum of the longest paths offered.
    """

    decode_rounds: int
    draft_rounds: int
    drafted: int
    draft_depth: int
    accepted: int
    tested: int
    emitted: int


def decode_rounds_by_request(cell: CellRecords) -> list[list[RoundRecord]]:
    """Return the decode rounds of each request that has any (request numbers repeat between servings)."""
    groups: dict[tuple[int, int], list[RoundRecord]] = {}
    for index, serving in enumerate(cell.servings):
        for row in serving.rounds:
            if row.round > 0:
                groups.setdefault((index, row.request), []).append(row)
    return list(groups.values())


def count_rounds(rounds: Iterable[RoundRecord]) -> RoundCounts:
    """Sum decode rounds."""
    rows = list(rounds)
    accepted = sum(row.accepted for row in rows)
    return RoundCounts(
        decode_rounds=len(rows),
        draft_rounds=sum(row.drafted > 0 for row in rows),
        drafted=sum(row.drafted for row in rows),
        draft_depth=sum(row.draft_depth for row in rows),
        accepted=accepted,
        tested=accepted + sum(row.rejected for row in rows),
        emitted=sum(row.emitted for row in rows),
    )


def tokens_per_target_step(counts: RoundCounts) -> float | None:
    """Return emitted / decode rounds: every step counts, also those without a draft."""
    return _ratio(counts.emitted, counts.decode_rounds)


def acceptance_length(counts: RoundCounts) -> float | None:
    """Return 1 + accepted / rounds with a draft: the bonus or recovered token is included."""
    mean = _ratio(counts.accepted, counts.draft_rounds)
    return None if mean is None else 1 + mean


def draft_acceptance_rate(counts: RoundCounts) -> float | None:
    """Return accepted / drafted."""
    return _ratio(counts.accepted, counts.drafted)


def alpha(counts: RoundCounts) -> float | None:
    """Return accepted / tested, the acceptance probability of Leviathan et al."""
    return _ratio(counts.accepted, counts.tested)


def wasted_draft_share(counts: RoundCounts) -> float | None:
    """Return 1 - accepted / drafted."""
    rate = draft_acceptance_rate(counts)
    return None if rate is None else 1 - rate


def mean_draft_depth(counts: RoundCounts) -> float | None:
    """Return the mean longest path of rounds with a draft: k, where k is fixed."""
    return _ratio(counts.draft_depth, counts.draft_rounds)


def mean_over_requests(
    groups: Iterable[Sequence[RoundRecord]], formula: Callable[[RoundCounts], float | None]
) -> float | None:
    """Return the mean of a ratio over the requests that have it, instead of the ratio of the sums."""
    values = [value for rows in groups if (value := formula(count_rounds(rows))) is not None]
    return _ratio(sum(values), len(values))


def joint_acceptance(rounds: Sequence[RoundRecord]) -> tuple[float, ...]:
    """Return, for i = 1, 2, ..., the share of rounds with a draft that accepted at least i tokens."""
    drafts = [row for row in rounds if row.drafted > 0]
    return tuple(
        sum(row.accepted >= position for row in drafts) / len(drafts) for position in _positions(drafts)
    )


def conditional_acceptance(rounds: Sequence[RoundRecord]) -> tuple[tuple[float, int], ...]:
    """Return, for i = 1, 2, ..., how often token i was accepted once the i - 1 before it were.

    Beside each share stands the number of rounds behind it: those that offered i tokens in depth and
    accepted i - 1. Positions that no round reached are left out, and all of them lie at the end.
    """
    table = []
    for position in _positions(rounds):
        reached = [row for row in rounds if row.draft_depth >= position and row.accepted >= position - 1]
        if not reached:
            break
        kept = sum(row.accepted >= position for row in reached)
        table.append((kept / len(reached), len(reached)))
    return tuple(table)


def joint_acceptance_per_request(groups: Iterable[Sequence[RoundRecord]]) -> tuple[float, ...]:
    """Return the mean over requests with a draft of their joint acceptance; a position never offered is 0."""
    tables = [table for rows in groups if (table := joint_acceptance(rows))]
    longest = max(map(len, tables), default=0)
    return tuple(sum(table[i] for table in tables if i < len(table)) / len(tables) for i in range(longest))


def conditional_acceptance_per_request(
    groups: Iterable[Sequence[RoundRecord]],
) -> tuple[tuple[float, int], ...]:
    """Return the mean over requests of their conditional acceptance, and the number of requests behind it."""
    tables = [conditional_acceptance(rows) for rows in groups]
    means = []
    for i in range(max(map(len, tables), default=0)):
        shares = [table[i][0] for table in tables if i < len(table)]
        means.append((sum(shares) / len(shares), len(shares)))
    return tuple(means)


def _positions(rounds: Iterable[RoundRecord]) -> range:
    return range(1, max((row.draft_depth for row in rounds), default=0) + 1)


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None
