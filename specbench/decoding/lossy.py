"""Rules that accept what the target finds plausible, whatever the draft: faster, but another distribution.

Acceptance is a function of p and the token, with no coin. What follows the accepted run is a sample from
p of its row, recovered or bonus alike, as in Medusa; at temperature 0 p is a point mass, only its token is
plausible, and every rule here is greedy decoding. Samples are keyed by position alone: with no draft the
output is ordinary decoding's, token for token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution
from specbench.decoding.proposal import Acceptance, Proposal, chain_path, require_chain
from specbench.decoding.random_numbers import Purpose, RoundRandom


class PlausibilityRule(ABC):
    """Keep a chain as long as each token is plausible to the target. Raises ValueError on a tree."""

    name: str
    lossless = False
    judges_trees = False

    @abstractmethod
    def plausible(self, p: Distribution, tokens: Tensor) -> Tensor:
        """Return whether each token `[B, N]` is plausible under its p `[B, N]`."""

    def verify(self, p: Distribution, proposal: Proposal, random: RoundRandom) -> Acceptance:
        """Judge a chain; see `Rule.verify`."""
        require_chain(proposal, self)
        num = proposal.num
        offered = torch.arange(num, device=proposal.tokens.device) < proposal.counts[:, None]
        keep = self.plausible(p.narrow(0, num), proposal.tokens) & offered
        accepted = keep.to(torch.int64).cumprod(1).sum(1)
        uniform = random.uniform(Purpose.TARGET, num + 1, by_round=False)
        next_token = p.rows(accepted).sample(uniform.gather(1, accepted[:, None]).squeeze(1))
        return Acceptance(accepted, chain_path(proposal), next_token, accepted < proposal.counts)


class Typical(PlausibilityRule):
    """Typical acceptance: Cai et al. 2401.10774 (Medusa), section 3.3.1.

    Accept d if p(d) > min(epsilon, delta exp(-H(p))), H in nats: the flatter p, the less is asked of a
    token. The defaults .09 and .3 (delta = sqrt(epsilon)) are those of Medusa's code and of vLLM, which call
    them posterior_threshold and posterior_alpha. The paper takes the first token of a round
    unconditionally, for there the target itself chose it; here that token belongs to the round before, and
    every draft token is judged. After a refusal vLLM's sampler took the argmax of p; Medusa samples.
    """

    name = "typical"

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not (0 < epsilon < 1 and delta > 0):
            raise ValueError(f"epsilon={epsilon}, delta={delta}; expected 0 < epsilon < 1 and delta > 0")
        self.epsilon = epsilon
        self.delta = delta

    def plausible(self, p: Distribution, tokens: Tensor) -> Tensor:
        """Return whether p(d) exceeds the threshold that p's entropy sets."""
        threshold = (self.delta * torch.exp(-p.entropy())).clamp(max=self.epsilon)
        return p.prob_of(tokens) > threshold


class Threshold(PlausibilityRule):
    """Accept d if p(d) >= threshold.

    SGLang's `speculative_accept_threshold_single` accepts these too, beside what its sampling accepts.

    The default of .3 is ours: no paper fixes one. At 1 only a certain token passes.
    """

    name = "threshold"

    def __init__(self, threshold: float = 0.3) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold}; expected 0 < threshold <= 1")
        self.threshold = threshold

    def plausible(self, p: Distribution, tokens: Tensor) -> Tensor:
        """Return whether p(d) reaches the threshold."""
        return p.prob_of(tokens) >= self.threshold


class TopK(PlausibilityRule):
    """Accept d if it is among the k most likely of p: Stern et al. 1811.03115, section 5.1.

    Ties go to the lowest id; a token with p(d) = 0 is never among them. The default of 2 is the least
    lenient k that is not a comparison with the argmax.
    """

    name = "top-k"

    def __init__(self, k: int = 2) -> None:
        if k < 1:
            raise ValueError(f"k={k}; expected at least 1")
        self.k = k

    def plausible(self, p: Distribution, tokens: Tensor) -> Tensor:
        """Return whether fewer than k tokens come before d."""
        return (p.rank_of(tokens) < self.k) & (p.prob_of(tokens) > 0)
