"""Leave the grammar's state after the drafted tokens, though some were rejected.

From then on the matcher parses a text that was never written. Reports: vLLM 48197 on advancing and taking
back; llguidance 117, which had no way to take back. Chains only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.commit import Committed
from specbench.runtime.events import Event
from specbench.runtime.grammar import Matcher
from specbench.runtime.loop import Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "grammar"
SHOWS: tuple[Shows, ...] = ("contract",)


class GrammarNotRolledBack(StepLoop):
    """Advance a matcher by the draft where it should advance by the output."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.drafts: dict[int, list[int]] = {}

    def grammar_masks(
        self, matcher: Matcher, nodes: Sequence[int], parents: Sequence[int]
    ) -> tuple[list[int], Tensor]:
        """Remember what the matcher was shown."""
        kept, masks = super().grammar_masks(matcher, nodes, parents)
        is_chain = list(parents) == list(range(-1, len(nodes) - 1))
        self.drafts[id(matcher)] = [nodes[node] for node in kept] if is_chain else []
        return kept, masks

    def _apply(self, row: Row, result: Committed, now: float, events: list[Event]) -> None:
        """Show the matcher the whole draft where a part of it was rejected."""
        matcher = row.matcher
        drafted = self.drafts.get(id(matcher), [])
        if matcher is None or len(result.tokens) > len(drafted):
            super()._apply(row, result, now, events)
            return
        row.matcher = None
        super()._apply(row, result, now, events)
        row.matcher = matcher
        for token in drafted:
            matcher.accept(token)


def alter(strategy: Strategy) -> Strategy:
    """Leave the matchers of a strategy where its drafts took them."""
    return plant(strategy, GrammarNotRolledBack)
