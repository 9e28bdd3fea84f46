"""After full acceptance sample the bonus token from the row before the last.

Invisible while drafts are rejected; needs a draft that is accepted in full.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import plant
from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "bonus row"
SHOWS: tuple[Shows, ...] = ("self", "good")


class BonusFromPreviousRow(RejectionSampling):
    """Be off by one row where the whole draft was accepted."""

    def next_law(
        self, p: Distribution, proposal: Proposal, accepted: Tensor, rejected: Tensor
    ) -> Distribution:
        """Return the law of the previous row for the bonus token, the right one otherwise."""
        complete = ~rejected & (accepted > 0)
        row = torch.where(complete, accepted - 1, accepted)
        return super().next_law(p, proposal, row, rejected)


def alter(strategy: Strategy) -> Strategy:
    """Break the bonus row of a strategy."""
    return plant(strategy, BonusFromPreviousRow)
