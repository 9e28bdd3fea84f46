"""A batch of next-token distributions, dense or as point masses, with one meaning for both.

Temperature 0, argmax drafts and n-gram drafts are point masses. The rules of verification never ask
which form they hold; only this file does, to spare needless arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distributions of shape `[...]`: either `probs` `[..., V]` or the certain `tokens` `[...]`.

    Dense probabilities may be unnormalised weights where the docstring of their maker says so.
    """

    probs: Tensor | None
    tokens: Tensor | None

    @classmethod
    def dense(cls, probs: Tensor) -> Distribution:
        """Wrap probabilities `[..., V]`."""
        return cls(probs, None)

    @classmethod
    def point(cls, tokens: Tensor) -> Distribution:
        """Put all mass of each distribution on one token, `[...]` int64."""
        return cls(None, tokens)

    @property
    def shape(self) -> torch.Size:
        """Return the shape without the vocabulary."""
        if self.probs is not None:
            return self.probs.shape[:-1]
        assert self.tokens is not None
        return self.tokens.shape

    def prob_of(self, tokens: Tensor) -> Tensor:
        """Return the probability of `tokens`, `[...]`."""
        if self.probs is not None:
            return self.probs.gather(-1, tokens[..., None]).squeeze(-1)
        assert self.tokens is not None
        return (self.tokens == tokens).to(torch.float64)

    def rows(self, index: Tensor) -> Distribution:
        """From `[B, R]` distributions pick row `index[b]` of each batch entry, giving `[B]`."""
        if self.probs is not None:
            batch = torch.arange(len(index), device=index.device)
            return Distribution.dense(self.probs[batch, index])
        assert self.tokens is not None
        return Distribution.point(self.tokens.gather(1, index[:, None]).squeeze(1))

    def narrow(self, start: int, length: int) -> Distribution:
        """From `[B, R]` distributions take rows `start` to `start + length` of each batch entry."""
        if self.probs is not None:
            return Distribution.dense(self.probs.narrow(1, start, length))
        assert self.tokens is not None
        return Distribution.point(self.tokens.narrow(1, start, length))

    def to_dense(self, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return probabilities `[..., V]`, spelling point masses out."""
        if self.probs is not None:
            return self.probs
        assert self.tokens is not None
        probs = torch.zeros(*self.tokens.shape, vocab, dtype=dtype, device=self.tokens.device)
        return probs.scatter_(-1, self.tokens[..., None], 1.0)

    def sample(self, uniform: Tensor) -> Tensor:
        """Draw one token from each distribution by inverse CDF in id order, `[...]` int64.

        `uniform` `[...]` float64 in (0, 1). The sum runs in float64: in float32 it would be off by more
        than the tail of a large vocabulary. Weights need not be normalised.
        """
        if self.tokens is not None:
            return self.tokens
        assert self.probs is not None
        cumulative = self.probs.cumsum(-1, dtype=torch.float64)
        total = cumulative[..., -1]
        # Strictly below the total, so that the token found always has mass.
        below = torch.nextafter(total, torch.zeros_like(total))
        height = torch.minimum(uniform * total, below)
        return torch.searchsorted(cumulative, height[..., None], right=True).squeeze(-1)


def residual(p: Distribution, q: Distribution) -> Distribution:
    """Return the law of the recovered token, proportional to max(p - q, 0), for distributions `[B]`.

    Leviathan et al. 2211.17192, section 2.3 (their p is the target, q the draft). Dense results are
    weights, not normalised: sampling by inverse CDF needs only their sum. Where p and q agree to the
    last bit nothing remains of the difference although a rejection was possible in exact arithmetic
    only with probability 0; the law is then p.
    """
    if p.tokens is not None:
        return p  # a rejected draft differs from the certain token, so all of p's mass is left over
    assert p.probs is not None
    if q.tokens is not None:
        weights = p.probs.scatter(-1, q.tokens[..., None], 0.0)
    else:
        assert q.probs is not None
        weights = (p.probs - q.probs).clamp_min(0.0)
    empty = weights.sum(-1, keepdim=True) <= 0
    return Distribution.dense(torch.where(empty, p.probs, weights))
