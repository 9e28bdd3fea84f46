"""After full acceptance take the most likely bonus token instead of a sample.

The more is accepted, the more of the text is greedy. Reports: SGLang 31214, where one platform verified
greedily at every temperature.
"""

from __future__ import annotations

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._rules import BrokenBonus, most_likely, plant
from specbench.decoding.distribution import Distribution
from specbench.decoding.verification import Proposal
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "bonus row"
SHOWS: tuple[Shows, ...] = ("self", "good")


class BonusArgmax(BrokenBonus):
    """Forget to sample."""

    def bonus(self, p: Distribution, proposal: Proposal, accepted: Tensor) -> Distribution:
        """Return all mass on the most likely token."""
        del proposal
        return most_likely(p.rows(accepted))


def alter(strategy: Strategy) -> Strategy:
    """Break the bonus row of a strategy."""
    return plant(strategy, BonusArgmax)
