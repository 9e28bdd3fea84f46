"""Report as the model's own log-probabilities those after penalties and temperature.

The logits were changed in place before they were read. Without parameters the two are the same. Reports: vLLM
30846 and TensorRT-LLM 17701.
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


class LogprobsRawOfProcessed(StepLoop):
    """Read logits after they were changed."""

    def logprobs(
        self, window: Window, p: Distribution, index: int, decision: Decision, tokens: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Return the processed values for both."""
        entries = super().logprobs(window, p, index, decision, tokens)
        if window.proposal.num == 0:
            return entries
        return [replace(entry, raw=entry.processed, top_raw=entry.top_processed) for entry in entries]


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy report processed values as raw ones."""
    return plant(strategy, LogprobsRawOfProcessed)
