"""Judge the padding of a shorter draft as if it had been offered.

Rows of a batch draft different lengths; the shorter ones are filled up with token 0, which may be accepted.
Shows only in batches of unlike lengths.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import plant
from specbench.decoding.distribution import Distribution
from specbench.decoding.random_numbers import RoundRandom
from specbench.decoding.verification import Acceptance, Proposal, RejectionSampling
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "batch"
SHOWS: tuple[Shows, ...] = ("identities",)


class PaddingRowsCounted(RejectionSampling):
    """Take the width of the batch for the length of every draft."""

    def verify(self, p: Distribution, proposal: Proposal, random: RoundRandom) -> Acceptance:
        """Judge all columns in all rows that were offered something."""
        if proposal.parents is not None:
            return super().verify(p, proposal, random)
        counts = torch.where(proposal.counts > 0, proposal.num, 0)
        return super().verify(p, replace(proposal, counts=counts), random)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy judge padding."""
    return plant(strategy, PaddingRowsCounted)
