"""Exact match: the target's own samples, which a draft may have guessed."""

from __future__ import annotations

import torch

from specbench.decoding.distribution import Distribution
from specbench.decoding.proposal import Acceptance, Proposal, chain_path
from specbench.decoding.random_numbers import Purpose, RoundRandom
from specbench.decoding.walk import Walk, first


class ExactMatch:
    """Sample the target at every row; keep the draft as long as it agrees; emit the target's sample.

    Lossless whatever the draft, and under one seed equal to ordinary decoding token for token, because
    the target's sample is keyed by position alone. Accepts less than rejection sampling: sum of p q
    instead of sum of min(p, q). With no draft it is ordinary decoding.
    """

    name = "exact"
    lossless = True
    judges_trees = True

    def verify(self, p: Distribution, proposal: Proposal, random: RoundRandom) -> Acceptance:
        """Judge a proposal; see `Rule.verify`."""
        if proposal.parents is not None:
            return self._verify_tree(p, proposal, random)
        if p.tokens is not None:
            sampled = p.tokens
        else:
            sampled = p.sample(random.uniform(Purpose.TARGET, proposal.num + 1, by_round=False))
        offered = torch.arange(proposal.num, device=sampled.device) < proposal.counts[:, None]
        keep = (sampled[:, : proposal.num] == proposal.tokens) & offered
        accepted = keep.to(torch.int64).cumprod(1).sum(1)
        next_token = sampled.gather(1, accepted[:, None]).squeeze(1)
        return Acceptance(accepted, chain_path(proposal), next_token, accepted < proposal.counts)

    def _verify_tree(self, p: Distribution, proposal: Proposal, random: RoundRandom) -> Acceptance:
        """Follow the target's sample from node to child: Miao et al. 2305.09781, naive sampling.

        Only the rows that are reached are sampled. A position is the depth of a node, so the sample there
        is ordinary decoding's whatever the tree.
        """
        uniform = random.uniform(Purpose.TARGET, proposal.num + 1, by_round=False)
        walk = Walk.start(proposal)
        while True:
            sampled = p.rows(walk.node + 1).sample(uniform.gather(1, walk.accepted[:, None]).squeeze(1))
            agreeing = walk.children() & (proposal.tokens == sampled[:, None])
            if not bool(agreeing.any()):
                return Acceptance(walk.accepted, walk.path, sampled, walk.children().any(1))
            walk.descend(first(agreeing), agreeing.any(1))
