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

    @classmethod
    def stack(cls, *rows: Distribution) -> Distribution:
        """Make `[B, R]` of R batches of distributions `[B]` of one form."""
        probs = [row.probs for row in rows if row.probs is not None]
        if probs:
            return cls.dense(torch.stack(probs, 1))
        return cls.point(torch.stack([row.tokens for row in rows if row.tokens is not None], 1))

    def where(self, condition: Tensor, other: Distribution) -> Distribution:
        """Take these where the condition `[B]` holds, else the others, of the same form, `[B]`."""
        if self.probs is not None and other.probs is not None:
            return Distribution.dense(torch.where(condition[:, None], self.probs, other.probs))
        assert self.tokens is not None
        assert other.tokens is not None
        return Distribution.point(torch.where(condition, self.tokens, other.tokens))

    def scaled(self, weight: Tensor) -> Distribution:
        """Multiply by a positive weight `[...]`; a point mass stays as it is, for it means the same."""
        if self.probs is None:
            return self
        return Distribution.dense(self.probs * weight[..., None].to(self.probs.dtype))

    def normalised(self) -> Distribution:
        """Turn weights into probabilities."""
        if self.probs is None:
            return self
        return Distribution.dense(self.probs / self.probs.sum(-1, keepdim=True))

    def entropy(self) -> Tensor:
        """Return the Shannon entropy in nats, `[...]`."""
        if self.probs is not None:
            return -torch.xlogy(self.probs, self.probs).sum(-1)
        assert self.tokens is not None
        return torch.zeros_like(self.tokens, dtype=torch.float64)

    def rank_of(self, tokens: Tensor) -> Tensor:
        """Return how many ids are more likely than `tokens` `[...]`, or as likely and lower."""
        if self.probs is not None:
            probs, ids = self.probs, torch.arange(self.probs.shape[-1], device=tokens.device)
            own = self.prob_of(tokens)[..., None]
            return ((probs > own) | ((probs == own) & (ids < tokens[..., None]))).sum(-1)
        assert self.tokens is not None
        lower = tokens + (self.tokens > tokens)  # the certain token comes first, the others by id
        return torch.where(self.tokens == tokens, 0, lower)

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


def excess(p: Distribution, q: Distribution, scale: Tensor) -> Tensor:
    """Return the sum of max(scale p - q, 0) over the vocabulary, for distributions `[...]`, as float64.

    `scale` `[...]` is at most 1.
    """
    if p.tokens is not None:
        return (scale - q.prob_of(p.tokens)).clamp_min(0.0)
    scaled = p.scaled(scale).probs
    assert scaled is not None
    if q.tokens is not None:
        difference = scaled.scatter(-1, q.tokens[..., None], 0.0)
    else:
        assert q.probs is not None
        difference = (scaled - q.probs).clamp_min(0.0)
    return difference.sum(-1, dtype=torch.float64)
