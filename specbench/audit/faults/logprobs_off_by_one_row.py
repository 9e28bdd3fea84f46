"""Report the log-probability of an accepted token under the row that follows it.

The row that a token leads to is taken for the row it came from.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.distribution import Distribution
from specbench.records import TokenLogprobs
from specbench.runtime.loop import Decision, StepLoop, Window
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "logprobs"
SHOWS: tuple[Shows, ...] = ("logprobs",)


class LogprobsOffByOneRow(StepLoop):
    """Read one row too far where a draft was accepted."""

    def logprobs(
        self, window: Window, p: Distribution, index: int, decision: Decision, tokens: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Return what the row after each accepted token gives it."""
        entries = super().logprobs(window, p, index, decision, tokens)
        kept = min(len(decision.taken), len(tokens))
        shifted = super().logprobs(window, p, index, decision, [tokens[0], *tokens[:kept]])
        return [*shifted[1:], *entries[kept:]]


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy report log-probabilities of the wrong rows."""
    return plant(strategy, LogprobsOffByOneRow)
