"""After full acceptance sample the bonus token from the row before the last (FAULTS.md, bonus row).

Invisible while drafts are rejected; needs a draft that is accepted in full.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.runtime.protocols import Strategy


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
    return replace(strategy, rule=BonusFromPreviousRow())
