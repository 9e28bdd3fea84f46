"""Drop a sampled draft token, and what follows it, because its q is below .3.

Whether a token is offered then depends on the token, so the offered ones no longer follow q: the target's
own sample stands in only where the draft drew something unlikely. To stop after such a token is fine. Each
offered token agrees with its q, so a test of proposals must see the ones that were dropped.
"""

from __future__ import annotations

import torch

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._drafters import WrappedDrafter, plant_in_chains
from specbench.decoding.verification import Proposal
from specbench.runtime.protocols import DraftContext, Strategy

CLASS: FaultClass = "proposal q"
SHOWS: tuple[Shows, ...] = ("good", "bad")

LEAST = 0.3


class UnlikelyDraftTokenDropped(WrappedDrafter):
    """Look at a token before offering it."""

    def propose(self, context: DraftContext) -> Proposal:
        """Offer each chain up to its first unlikely token, which is left out."""
        proposal = self.inner.propose(context)
        if proposal.num == 0:
            return proposal
        likely = (proposal.q.prob_of(proposal.tokens) >= LEAST).to(torch.int64).cumprod(1).sum(1)
        offered = torch.minimum(likely, proposal.counts).tolist()
        most = max(offered)
        return Proposal.chains(proposal.tokens[:, :most], offered, proposal.q.narrow(0, most))


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy drop unlikely tokens of its chains."""
    return plant_in_chains(strategy, UnlikelyDraftTokenDropped)
