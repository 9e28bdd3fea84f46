"""Let penalties count the drafted tokens that were rejected.

The counts are raised when a token is drafted, and never lowered. What the model thought of saying is held
against it from then on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.processing import History, SamplingTensors
from specbench.decoding.verification import Acceptance, Proposal
from specbench.runtime.loop import Decision, StepLoop, Window
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters",)


class PenaltiesCountRejected(StepLoop):
    """Keep the counts of rejected tokens."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.thought_of: dict[int, list[int]] = {}

    def decide(self, acceptance: Acceptance, proposal: Proposal) -> list[Decision]:
        """Remember what each row of a decode step was offered in vain."""
        decided = super().decide(acceptance, proposal)
        if proposal.num:
            rows = zip(self.active, decided, proposal.tokens.tolist(), proposal.offered, strict=True)
            for row, decision, tokens, offered in rows:
                seen = self.thought_of.setdefault(row.request.id, [])
                seen += [tokens[node] for node in range(offered) if node not in decision.taken]
        return decided

    def history(self, window: Window, sampling: SamplingTensors) -> History | None:
        """Return histories that hold them, as if they had been said before the rest of the output."""
        history = super().history(window, sampling)
        if history is None:
            return None
        tokens = [
            [*text[:prompt], *self.thought_of.get(row.request.id, []), *text[prompt:]]
            for text, prompt, row in zip(history.tokens, history.prompts, window.rows, strict=True)
        ]
        return replace(history, tokens=tokens)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy penalise what it rejected."""
    return plant(strategy, PenaltiesCountRejected)
