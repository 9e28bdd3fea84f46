"""Read the number of accepted tokens of the step before.

The copy from the device has not arrived when it is read. Right as long as acceptance does not change.
Chains only. Reports: openvino.genai 4190, a rejection that was handled one iteration late.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.verification import Acceptance, Proposal
from specbench.runtime.loop import Decision, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "batch"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class AcceptanceOfPreviousStep(StepLoop):
    """Read a buffer before it is written."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.buffer: list[int] = []

    def decide(self, acceptance: Acceptance, proposal: Proposal) -> list[Decision]:
        """Return decisions with the counts that the buffer held for those rows."""
        if proposal.num == 0 or proposal.parents is not None:
            return super().decide(acceptance, proposal)
        stale, self.buffer = self.buffer, acceptance.accepted.tolist()
        stale += self.buffer[len(stale) :]
        counts = [min(count, offered) for count, offered in zip(stale, proposal.offered, strict=False)]
        accepted = torch.tensor(counts, device=acceptance.accepted.device)
        rejected = accepted < proposal.counts
        return super().decide(replace(acceptance, accepted=accepted, rejected=rejected), proposal)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy read acceptance too early."""
    return plant(strategy, AcceptanceOfPreviousStep)
