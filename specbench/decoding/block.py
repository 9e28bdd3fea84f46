"""Block verification: a chain is judged as a whole; a good sequel can save a doubtful token."""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution, excess, residual
from specbench.decoding.proposal import Acceptance, Proposal, chain_path, require_chain
from specbench.decoding.random_numbers import Purpose, RoundRandom
from specbench.decoding.rejection import draw_next


class BlockVerification:
    """Sun et al. 2403.10444 (ICLR 2025), algorithm 2. Chains only; raises ValueError on a tree.

    The paper's M_b is p, its M_s is q, its block X_1 ... X_gamma is the chain, tau is `accepted`, p_i is
    `joint[:, i]`, eta_i is coin i - 1. Lossless, and no rule that sees no more than this accepts more tokens
    in expectation; never fewer than token-wise rejection sampling, with which it agrees at temperature 0
    and on chains of one token.
    """

    name = "block"
    lossless = True
    judges_trees = False

    def joint(self, p: Distribution, proposal: Proposal) -> Tensor:
        """Return p_0 = 1 and p_i = min(p_(i-1) p(X_i) / q(X_i), 1), `[B, N + 1]` float64."""
        num = proposal.num
        p_draft = p.narrow(0, num).prob_of(proposal.tokens).to(torch.float64)
        # 0 / 0: a token that neither can produce is refused.
        ratio = (p_draft / proposal.q.prob_of(proposal.tokens)).nan_to_num(nan=0.0)
        joint = [torch.ones_like(p_draft.sum(1))]
        for i in range(num):
            joint.append((joint[-1] * ratio[:, i]).clamp(max=1.0))
        return torch.stack(joint, 1)

    def decide(
        self, p: Distribution, proposal: Proposal, joint: Tensor, coins: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return tau, the last i that passes, and whether it falls short of gamma, both `[B]`.

        i passes with probability h_i = S_i / (S_i + 1 - p_i), where S_i is the sum of max(p_i p - q, 0) over
        the laws of the token after X_i; the last one of the chain with h_gamma = p_gamma.
        """
        num = proposal.num
        if num == 0:
            return proposal.counts, proposal.counts > 0
        reached = joint[:, 1:]
        following = excess(p.narrow(1, num - 1), proposal.q.narrow(1, num - 1), joint[:, 1:num])
        left = torch.cat([following, torch.zeros_like(reached[:, :1])], 1)
        place = torch.arange(1, num + 1, device=coins.device)
        is_last = place == proposal.counts[:, None]
        numerator = torch.where(is_last, reached, left)
        denominator = torch.where(is_last, 1.0, left + 1 - reached)
        # 0 / 0: p and q agree from here on, and whatever is decided, the rest of the chain passes.
        passes = (coins * denominator <= numerator) & (place <= proposal.counts[:, None])
        accepted = (passes * place).amax(1)
        return accepted, accepted < proposal.counts

    def next_law(
        self, p: Distribution, proposal: Proposal, joint: Tensor, accepted: Tensor, rejected: Tensor
    ) -> Distribution:
        """Return the law of the token after the accepted run, `[B]` (weights).

        The residual max(p_tau p - q, 0) if the chain was not accepted whole, else p.
        """
        bonus = p.rows(accepted)
        if proposal.num == 0:
            return bonus
        judged = accepted.clamp(max=proposal.num - 1)
        scaled = bonus.scaled(joint.gather(1, accepted[:, None]).squeeze(1))
        return residual(scaled, proposal.q.rows(judged)).where(rejected, bonus)

    def verify(self, p: Distribution, proposal: Proposal, random: RoundRandom) -> Acceptance:
        """Judge a chain; see `Rule.verify`."""
        require_chain(proposal, self)
        joint = self.joint(p, proposal)
        accepted, rejected = self.decide(p, proposal, joint, random.uniform(Purpose.COIN, proposal.num))
        law = self.next_law(p, proposal, joint, accepted, rejected)
        next_token = draw_next(law, accepted, rejected, proposal.num, random)
        return Acceptance(accepted, chain_path(proposal), next_token, rejected)
