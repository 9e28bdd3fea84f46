"""Subtract the next position's q after a rejection.

The index of q is taken after it was advanced: p of the rejected token's row, less the draft's law of the
token behind it. The last position of a draft has no next one, and is right.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import plant
from specbench.decoding.distribution import Distribution, residual
from specbench.decoding.verification import Proposal, RejectionSampling
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "residual"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class ResidualFromNextQ(RejectionSampling):
    """Read q one row too late."""

    def next_law(
        self, p: Distribution, proposal: Proposal, accepted: Tensor, rejected: Tensor
    ) -> Distribution:
        """Return the residual of p and the q behind the rejected token."""
        bonus = p.rows(accepted)
        if proposal.num == 0:
            return bonus
        late = (accepted + 1).clamp(max=proposal.num - 1)
        return residual(bonus, proposal.q.rows(late)).where(rejected, bonus)


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy subtract the wrong row of q."""
    return plant(strategy, ResidualFromNextQ)
