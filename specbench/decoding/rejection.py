"""Speculative sampling: accept by the ratio of target to draft, on rejection sample from what is left."""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution, residual
from specbench.decoding.proposal import Acceptance, Proposal, chain_path, require_chain
from specbench.decoding.random_numbers import Purpose, RoundRandom
from specbench.decoding.walk import Walk, first


class RejectionSampling:
    """Token-wise speculative sampling: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318.

    Draft token d is kept with probability min(1, p(d) / q(d)); at the first one that is not, the
    recovered token comes from norm(max(p - q, 0)). Both papers write p for the target and q for the draft
    in this sense (Chen et al. swap them). Coins and samples are keyed by the round: a look-ahead rule may
    decide the same position twice, and must not use one number twice.

    In a tree the children of a node get their chance one after the other: see `walk`.
    """

    name = "rejection"
    lossless = True
    judges_trees = True

    def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many tokens of a chain are accepted and whether a rejection ended it, both `[B]`."""
        require_chain(proposal, self)
        num = proposal.num
        p_draft = p.narrow(0, num).prob_of(proposal.tokens)
        q_draft = proposal.q.prob_of(proposal.tokens)
        offered = torch.arange(num, device=coins.device) < proposal.counts[:, None]
        keep = (coins * q_draft < p_draft) & offered
        accepted = keep.to(torch.int64).cumprod(1).sum(1)
        return accepted, accepted < proposal.counts

    def next_law(
        self, p: Distribution, proposal: Proposal, accepted: Tensor, rejected: Tensor
    ) -> Distribution:
        """Return the law of the token after the accepted chain, `[B]`: residual if rejected, else p."""
        bonus = p.rows(accepted)
        if proposal.num == 0:
            return bonus
        judged = accepted.clamp(max=proposal.num - 1)
        recovered = residual(bonus, proposal.q.rows(judged))
        return recovered.where(rejected, bonus)

    def walk(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Walk, Distribution]:
        """Walk down a tree; return where each row ends, and the law of its next token (weights) `[B]`.

        Recursive rejection sampling: Miao et al. 2305.09781 (SpecInfer), section 4.3, multi-step speculative
        sampling; Jeon et al. 2402.14160, where siblings are drawn without replacement. SpecInfer's P_LLM is
        p, its P_SSM_s is the q of child s. `law` is p': the p that follows the last accepted node, then
        norm(max(p' - q, 0)) for each refused child in turn. A child is judged as a chain of one token whose
        target is p', so that what holds of chains, and breaks them, holds here. Coins `[B, N]` are indexed
        by node.
        """
        walk = Walk.start(proposal)
        law, last = p.rows(walk.node + 1), walk.node
        while bool((untried := walk.children() & (walk.index > last[:, None])).any()):
            child, judged = first(untried), untried.any(1)
            here = child[:, None]
            candidate = Proposal(
                proposal.tokens.gather(1, here),
                judged.to(torch.int64),
                [1] * len(judged),
                Distribution.stack(proposal.q.rows(child)),
            )
            rows = Distribution.stack(law, p.rows(child + 1))
            accepted, rejected = self.decide(rows, candidate, coins.gather(1, here))
            following = self.next_law(rows, candidate, accepted, rejected)
            law = following.normalised().where(rejected, following)
            walk.descend(child, accepted > 0)
            last = torch.where(judged, child, last)
        return walk, law

    def verify(self, p: Distribution, proposal: Proposal, random: RoundRandom) -> Acceptance:
        """Judge a proposal; see `Rule.verify`."""
        coins = random.uniform(Purpose.COIN, proposal.num)
        if proposal.parents is None:
            accepted, rejected = self.decide(p, proposal, coins)
            law = self.next_law(p, proposal, accepted, rejected)
            path = chain_path(proposal)
        else:
            walk, law = self.walk(p, proposal, coins)
            accepted, rejected, path = walk.accepted, walk.children().any(1), walk.path
        next_token = draw_next(law, accepted, rejected, proposal.num, random)
        return Acceptance(accepted, path, next_token, rejected)


def draw_next(law: Distribution, accepted: Tensor, rejected: Tensor, num: int, random: RoundRandom) -> Tensor:
    """Draw the recovered or bonus token `[B]`, each from its own stream at the position it gets."""
    if law.probs is None:
        return law.sample(accepted)  # certain: no random number is read
    position = accepted[:, None]
    recovered = random.uniform(Purpose.RESIDUAL, num + 1).gather(1, position)
    bonus = random.uniform(Purpose.TARGET, num + 1).gather(1, position)
    return law.sample(torch.where(rejected[:, None], recovered, bonus).squeeze(1))
