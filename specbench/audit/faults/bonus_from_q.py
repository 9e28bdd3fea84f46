"""After full acceptance sample the bonus token from the draft's last row.

The draft has no row for that place, so the law is that of the token before. After a certain draft, the
drafted token comes twice.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import BrokenBonus, in_form_of, plant
from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "bonus row"
SHOWS: tuple[Shows, ...] = ("self", "good")


class BonusFromQ(BrokenBonus):
    """Read the draft's row for a token that only the target has a row for."""

    def bonus(self, p: Distribution, proposal: Proposal, accepted: Tensor) -> Distribution:
        """Return q of the last accepted token."""
        place = (accepted - 1).clamp(min=0)
        return in_form_of(p.rows(accepted), proposal.q.rows(place))


def alter(strategy: Strategy) -> Strategy:
    """Break the bonus row of a strategy."""
    return plant(strategy, BonusFromQ)
