"""Report the draft's log-probability of every accepted token.

The number at hand where a token is drafted is q. Reports: vLLM 34497.
"""

from __future__ import annotations

import math
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


class LogprobsOfDraft(StepLoop):
    """Report log q."""

    def logprobs(
        self, window: Window, p: Distribution, index: int, decision: Decision, tokens: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Return log q for the accepted run."""
        entries = super().logprobs(window, p, index, decision, tokens)
        proposal = window.proposal
        claimed = proposal.q.prob_of(proposal.tokens)[index].tolist()
        own = [math.log(claimed[node]) for node in decision.taken][: len(entries)]
        drafted = [
            replace(entry, raw=value, processed=value) for entry, value in zip(entries, own, strict=False)
        ]
        return [*drafted, *entries[len(own) :]]


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy report log-probabilities of its draft."""
    return plant(strategy, LogprobsOfDraft)
