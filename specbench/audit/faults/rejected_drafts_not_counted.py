"""Count as drafted only what was accepted: a rate of 100 %.

Every record agrees with every other; that nothing was ever rejected is what cannot be. Reports: TensorRT-LLM
14724 on a number of drafts that was not the one observed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.records import RoundRecord
from specbench.runtime.loop import Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "metrics"
SHOWS: tuple[Shows, ...] = ("identities", "acceptance")


class RejectedDraftsNotCounted(StepLoop):
    """Forget rejected tokens."""

    def describe_round(self, row: Row, *rest: Any) -> RoundRecord:
        """Cut the draft to its accepted part."""
        record = super().describe_round(row, *rest)
        if record.draft_parents is not None or record.drafted != record.draft_depth:
            return record
        kept = record.accepted
        tokens, probs = record.draft_tokens, record.draft_probs
        return replace(
            record,
            drafted=kept,
            draft_depth=kept,
            rejected=False,
            draft_tokens=None if tokens is None else tokens[:kept],
            draft_probs=None if probs is None else probs[:kept],
        )


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy leave out rejected tokens."""
    return plant(strategy, RejectedDraftsNotCounted)
