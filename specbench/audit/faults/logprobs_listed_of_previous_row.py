"""List the likeliest tokens of the row before beside each log-probability.

The token's own value is right, the alternatives are those of another place. Whoever checks the former alone
sees nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.distribution import Distribution
from specbench.records import TokenLogprobs
from specbench.runtime.loop import Decision, StepLoop, Window
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "logprobs"
SHOWS: tuple[Shows, ...] = ("logprobs",)


class LogprobsListedOfPreviousRow(StepLoop):
    """Read the lists one row too early."""

    def logprobs(
        self, window: Window, p: Distribution, index: int, decision: Decision, tokens: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Return the lists of the row before."""
        entries = super().logprobs(window, p, index, decision, tokens)
        return [
            replace(entry, top_raw=before.top_raw, top_processed=before.top_processed)
            for before, entry in zip([*entries[:1], *entries], entries, strict=False)
        ]


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy list the alternatives of another place."""
    return plant(strategy, LogprobsListedOfPreviousRow)
