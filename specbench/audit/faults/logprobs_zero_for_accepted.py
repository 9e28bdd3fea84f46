"""Report log-probability 0 for every accepted token.

Verification made them certain, as it seems. Reports: llama.cpp 27972 and vLLM 17876.
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


class LogprobsZeroForAccepted(StepLoop):
    """Take accepted for certain."""

    def logprobs(
        self, window: Window, p: Distribution, index: int, decision: Decision, tokens: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Return 0 for the accepted run."""
        entries = super().logprobs(window, p, index, decision, tokens)
        accepted = len(decision.taken)
        return [
            replace(entry, raw=0.0, processed=0.0) if place < accepted else entry
            for place, entry in enumerate(entries)
        ]


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy call accepted tokens certain."""
    return plant(strategy, LogprobsZeroForAccepted)
