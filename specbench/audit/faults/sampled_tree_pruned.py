"""Prune the nodes of a sampled tree whose q is below .2.

Right for trees of the most likely tokens, which are not drawn; of a drawn sibling it may not depend on what
it is whether it is judged. Trees only.
"""

from __future__ import annotations

import torch

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._drafters import WrappedDrafter, plant
from specbench.decoding.distribution import Distribution
from specbench.decoding.padding import padded
from specbench.decoding.verification import Proposal
from specbench.runtime.protocols import DraftContext, Strategy

CLASS: FaultClass = "proposal q"
SHOWS: tuple[Shows, ...] = ("good", "bad")

LEAST = 0.2


class SampledTreePruned(WrappedDrafter):
    """Look at nodes before offering them."""

    def propose(self, context: DraftContext) -> Proposal:
        """Offer the likely nodes under likely nodes."""
        proposal = self.inner.propose(context)
        if proposal.parents is None or proposal.q.probs is None:
            return proposal
        likely = (proposal.q.prob_of(proposal.tokens) >= LEAST).tolist()
        kept: list[list[int]] = []
        parents: list[list[int]] = []
        for row, its in enumerate(proposal.parents.tolist()):
            nodes: list[int] = []
            for node in range(proposal.offered[row]):
                if likely[row][node] and (its[node] < 0 or its[node] in nodes):
                    nodes.append(node)
            kept.append(nodes)
            parents.append([nodes.index(its[node]) if its[node] >= 0 else -1 for node in nodes])
        device = proposal.tokens.device
        if not any(kept):
            return Proposal.empty(len(kept), device)
        places = padded(kept, device)
        rows = torch.arange(len(kept), device=device)[:, None]
        return Proposal.trees(
            proposal.tokens.gather(1, places),
            padded(parents, device),
            [len(nodes) for nodes in kept],
            Distribution.dense(proposal.q.probs[rows, places]),
        )


def alter(strategy: Strategy) -> Strategy:
    """Prune the trees of a strategy; one that drafts chains stays as it is."""
    return plant(strategy, SampledTreePruned) if strategy.max_nodes else strategy
