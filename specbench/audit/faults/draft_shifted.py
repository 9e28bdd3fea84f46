"""Offer the draft shifted by one position: token i + 1 where token i belongs.

The first drafted token is dropped before anyone looks at it, and each of the others goes one place up
with the law it was drawn from, so q stays true and the output stays the target's: the audit must pass.
Only acceptance suffers, which is for the gate to notice. Of the class of draft caches that are not rolled
back and hidden states paired with the wrong token, reported as "speculation works, but is slow".
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._drafters import WrappedDrafter, plant_in_chains
from specbench.decoding.verification import Proposal
from specbench.runtime.protocols import DraftContext, Strategy

CLASS: FaultClass = "KV and position state"
SHOWS: tuple[Shows, ...] = ()


class ShiftedDrafter(WrappedDrafter):
    """A drafter whose chains lost their first token on the way.

    The inner drafter is told that nothing of its own chain was kept, so that it reads what was committed
    afresh: its state stays right, only its offer is not.
    """

    def propose(self, context: DraftContext) -> Proposal:
        """Offer all but the first token of each chain, one place too early."""
        proposal = self.inner.propose(context)
        if proposal.num == 0:
            return proposal
        return Proposal.chains(
            proposal.tokens[:, 1:],
            [max(offered - 1, 0) for offered in proposal.offered],
            proposal.q.narrow(1, proposal.num - 1),
        )

    def commit(self, accepted: Sequence[int], features: dict[int, Tensor]) -> None:
        """Tell the inner drafter that none of its chain was kept."""
        self.inner.commit([0] * len(accepted), features)


def alter(strategy: Strategy) -> Strategy:
    """Shift the chains that a strategy drafts."""
    return plant_in_chains(strategy, ShiftedDrafter)
