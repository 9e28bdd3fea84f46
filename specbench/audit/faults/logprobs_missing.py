"""Report log-probabilities for the last token of each round only.

Those of accepted tokens are missing, and later ones stand beside the wrong tokens. Reports: vLLM 34497.
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


class LogprobsMissing(StepLoop):
    """Sample the extra token with log-probabilities, accept without."""

    def logprobs(
        self, window: Window, p: Distribution, index: int, decision: Decision, tokens: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Return the last entry."""
        entries = super().logprobs(window, p, index, decision, tokens)
        return entries[-1:]


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy leave out log-probabilities of accepted tokens."""
    return plant(strategy, LogprobsMissing)
