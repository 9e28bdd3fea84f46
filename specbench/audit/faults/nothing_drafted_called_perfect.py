"""Report 100 % acceptance because nothing was drafted.

Speculation is off, silently, and every token of ordinary decoding counts as a draft of one that was accepted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specbench.audit.faults import FaultClass, Shows
from specbench.records import RoundRecord
from specbench.runtime.loop import Row, StepLoop
from specbench.runtime.protocols import BatchView, StepView, Strategy

CLASS: FaultClass = "metrics"
SHOWS: tuple[Shows, ...] = ("identities",)


class Never:
    """A length policy that lets nobody draft; it claims the longest draft of the one in its place."""

    stop_below = 0.0
    lively_batch: int | None = None

    def __init__(self, most: int) -> None:
        self.max_length = most

    def reset(self) -> None:
        """Nothing was learnt."""

    def choose(self, view: BatchView) -> list[int]:
        """Return 0 for each row."""
        return [0] * len(view.contexts)

    def observe(self, step: StepView) -> None:
        """Learn nothing."""


class NothingDraftedCalledPerfect(StepLoop):
    """Count the one token of every round as drafted and accepted."""

    def describe_round(self, row: Row, *rest: Any) -> RoundRecord:
        """Claim a draft of one."""
        record = super().describe_round(row, *rest)
        if record.round == 0 or record.drafted:
            return record
        return replace(record, drafted=1, draft_depth=1, accepted=1)


def alter(strategy: Strategy) -> Strategy:
    """Switch the drafts of a strategy off, and report the best of rates."""
    if strategy.drafter is None:
        return strategy
    policy = Never(strategy.policy.max_length)
    return replace(strategy, policy=policy, loop=NothingDraftedCalledPerfect)
