"""Drafted tokens against the law q that the drafter claims they were drawn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specbench.audit.betting import FloatArray, Mixture
from specbench.audit.lumping import LARGEST_WHOLE, lump
from specbench.audit.verdicts import ComponentResult

POWERS = (0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 2.0)
ARGMAX_SHARES = (0.05, 0.2, 0.9)
NUCLEUS = 0.95
_KEPT = 0.01  # of q, mixed into every alternative, so that none dies on one token


@dataclass(frozen=True, slots=True)
class Weighed:
    """Log factors of drafted tokens `[n, alternatives]`, 0 where they are not possible under q `[n]`."""

    log_factors: FloatArray
    possible: npt.NDArray[np.bool_]

    def part(self, start: int, stop: int) -> Weighed:
        """Return what some consecutive tokens say."""
        return Weighed(self.log_factors[start:stop], self.possible[start:stop])


class Proposals:
    """An e-process that grows when draft tokens do not follow their claimed q.

    Null hypothesis: given everything before it, each drafted token was drawn from its claimed row of q; a
    sibling in a tree from its row given the earlier siblings. The alternatives are q^b (the draft sampled at
    another temperature than it says), a share of argmax (a greedy draft that claims its softmax), q cut at
    its top .95 (a draft truncated, its claim not), and any law given by the caller: that of the raw logits,
    where the claim is the processed ones or the other way round. A token that its q gives probability 0 was
    not drawn from it, and alarms by itself.

    Invalid when drafted tokens are missing for what they are: those dropped after a look at their
    probability are the very fault, so record a token when it is drawn. Point-mass drafts (n-grams) pass
    by definition.

    No alarm does not show that q is right, only that these alternatives gained nothing; a q that is wrong
    in no systematic direction goes unnoticed.

    References:
        Chen et al., arXiv 2302.01318 (the theorem needs tokens drawn from q); Ramdas et al. (2023).

    Args:
        alpha: Its share of the error budget.
        others: Names of the laws that the caller gives with every chunk.

    >>> generator = np.random.default_rng(0)
    >>> q = generator.dirichlet(np.ones(16), 400)
    >>> draft = Proposals(alpha=0.001)
    >>> draft.add(q, q.argmax(1))
    >>> draft.result().alarm
    True
    """

    def __init__(self, alpha: float, *, others: Sequence[str] = ()) -> None:
        self.others = tuple(others)
        names = [f"q^{power:g}" for power in POWERS]
        names += [f"{share:g} argmax" for share in ARGMAX_SHARES]
        names += [f"top {NUCLEUS:g} of q", *self.others]
        self.mixture = Mixture(names, alpha)
        self.tokens = 0
        self.impossible = 0

    def add(
        self, q: npt.ArrayLike, tokens: npt.ArrayLike, laws: Mapping[str, npt.ArrayLike] | None = None
    ) -> None:
        """Take in drafted tokens in the order of drawing; see `weigh` for the arguments."""
        self.take(self.weigh(q, tokens, laws))

    def weigh(
        self, q: npt.ArrayLike, tokens: npt.ArrayLike, laws: Mapping[str, npt.ArrayLike] | None = None
    ) -> Weighed:
        """Return what drafted tokens say, without taking it in: all that is kept of their laws.

        Args:
            q: Their claimed laws [n, vocab], renormalised here.
            tokens: The tokens [n].
            laws: One law [n, vocab] for each name in `others`.
        """
        claimed = _normalised(q)
        drawn = np.asarray(tokens, dtype=np.int64)
        laws = laws or {}
        if set(laws) != set(self.others):
            raise ValueError(f"laws {sorted(laws)} were given; expected {sorted(self.others)}")
        if drawn.shape != claimed.shape[:1]:
            raise ValueError(f"{drawn.shape} tokens for {claimed.shape[:1]} rows")
        possible = claimed[np.arange(len(drawn)), drawn] > 0
        factors = np.zeros((len(drawn), len(self.mixture.names)))
        if possible.any():
            given = [_normalised(laws[name])[possible] for name in self.others]
            columns = _by_columns(claimed[possible], drawn[possible], given)
            factors[possible] = _log_factors(*columns)
        return Weighed(factors, possible)

    def take(self, weighed: Weighed) -> None:
        """Take in what `weigh` found."""
        self.tokens += len(weighed.possible)
        self.impossible += int((~weighed.possible).sum())
        if weighed.possible.any():
            self.mixture.multiply(weighed.log_factors[weighed.possible])

    def state(self) -> dict[str, Any]:
        """Return everything needed to go on later, in JSON types."""
        return {"mixture": self.mixture.state(), "tokens": self.tokens, "impossible": self.impossible}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.mixture.restore(state["mixture"])
        self.tokens, self.impossible = state["tokens"], state["impossible"]

    def result(self) -> ComponentResult:
        """Return what was found so far; tokens are drafted tokens."""
        if self.impossible:
            words = (
                f"{self.impossible} draft tokens have probability 0 in the q they were claimed to come from"
            )
            count = float(self.impossible)
            return ComponentResult("proposals", True, count, "exact", 0.0, self.tokens, words)
        return self.mixture.component(
            "proposals",
            self.tokens,
            found=f"the draft's tokens do not follow its q (most like {self.mixture.best})",
            quiet=f"{self.tokens} draft tokens agree with the q they were claimed to come from",
        )


def _normalised(law: npt.ArrayLike) -> FloatArray:
    rows = np.asarray(law, dtype=np.float64)
    sums = rows.sum(-1, keepdims=True)
    if rows.ndim != 2 or not (np.all(rows >= 0) and np.all(np.isfinite(sums) & (sums > 0))):
        raise ValueError("a law has a row that is no distribution; expected [n, vocab], sums above 0")
    return np.asarray(rows / sums)


_Tokens = npt.NDArray[np.int64]


def _by_columns(
    q: FloatArray, tokens: _Tokens, given: Sequence[FloatArray]
) -> tuple[FloatArray, _Tokens, Sequence[FloatArray], FloatArray | None]:
    """Return the same over the symbols of a large vocabulary, and how many ids each holds (`lumping`)."""
    if q.shape[1] <= LARGEST_WHOLE:
        return q, tokens, given, None
    found = lump(torch.from_numpy(q), None, smallest=np.finfo(np.float64).tiny)
    symbols = found.symbols(torch.from_numpy(tokens)).numpy()
    others = [found.lump(torch.from_numpy(law)).numpy() for law in given]
    return _normalised(found.p.numpy()), symbols, others, found.count.numpy()


def _log_factors(
    q: FloatArray, tokens: _Tokens, given: Sequence[FloatArray], count: FloatArray | None = None
) -> FloatArray:
    """Return log (.99 a(x) / q(x) + .01) for every alternative a [n, alternatives]."""
    rows = np.arange(len(tokens))
    at_token = q[rows, tokens]
    each = q if count is None else q / count.clip(min=1)  # q of one of a column's ids
    log_each = np.log(each, out=np.full_like(q, -math.inf), where=q > 0)
    ratios = []
    for power in POWERS:
        powers = np.exp(power * log_each)
        total = (powers if count is None else powers * count).sum(1)
        ratios.append(each[rows, tokens] ** (power - 1) / total)
    is_largest = tokens == (q if count is None else q * (count <= 1)).argmax(1)
    ratios += [(1 - share) + share * is_largest / at_token for share in ARGMAX_SHARES]
    ratios.append(_nucleus_ratio(q, tokens))
    ratios += [law[rows, tokens] / at_token for law in given]
    return np.log((1 - _KEPT) * np.stack(ratios, axis=1) + _KEPT)


def _nucleus_ratio(q: FloatArray, tokens: npt.NDArray[np.int64]) -> FloatArray:
    """Return a(x) / q(x) of q restricted to its most likely tokens that together hold `NUCLEUS`."""
    rows = np.arange(len(tokens))
    ordered = np.sort(-q, axis=1)
    np.negative(ordered, out=ordered)
    kept = ordered.cumsum(1) - ordered < NUCLEUS
    mass = np.where(kept, ordered, 0.0).sum(1)
    # The token's rank, lower ids first among equals; a sort that also moves the ids takes six times as long.
    at_token = q[rows, tokens][:, None]
    earlier = np.arange(q.shape[1]) < tokens[:, None]
    rank = ((q > at_token) | ((q == at_token) & earlier)).sum(1)
    return np.asarray((rank < kept.sum(1)) / mass)
