"""A coarser alphabet for large vocabularies: likely tokens by themselves, the unlikely in lumps.

Forty alternatives over 50,000 ids cost more than the forward that scored them, and nearly all of it is spent
on ids that hardly ever come up. Lumping ids into symbols by p and q alone, hence by (prompt, x_<t), changes
the question a little and its validity not at all: under the null the symbol of x_t is drawn from the lumped
law, and an alternative on symbols is an alternative on ids that treats those of one lump alike, a(x) / p(x)
being constant there.

The unlikely ids between two that stand alone are a run, and runs keep their place, so that cumulative sums in
id order are exact at the ids that matter. Those that are all but impossible, most of a vocabulary with hardly
any mass, are one symbol of their own: among others nobody would notice when they are emitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

ALONE = 512
"""Ids that stand alone: the likeliest under max(p, q)."""
LARGEST_WHOLE = 4 * (2 * ALONE + 2)
"""Vocabularies up to this are not lumped: it would gain little."""
RARE_MASS = 1e-3
"""Most that p, and q, can give to all ids together that are all but impossible under both."""
BLOCK_VALUES = 8 * 49_152
"""Probabilities lumped at a time: 3 MB per array in float64, of which some ten are held."""
LEAST_LUMP = 1e-18
"""Least probability of a lump that holds possible ids: below it a difference of sums is rounding."""


@dataclass(frozen=True, slots=True)
class Lumped:
    """Laws over symbols, S = 2 `ALONE` + 2: a run, an id, a run, .. an id, a run, and the rest.

    Args:
        p: The target's law `[n, S]`, float64.
        q: The draft's `[n, S]`, or None.
        count: How many ids with p > 0 each symbol holds `[n, S]`, float64.
        alone: The ids that stand alone, ascending `[n, ALONE]`.
        is_rare: Which ids are the rest's, the last symbol's `[n, V]`.
    """

    p: Tensor
    q: Tensor | None
    count: Tensor
    alone: Tensor
    is_rare: Tensor

    def symbols(self, tokens: Tensor) -> Tensor:
        """Return the symbol that holds each row's token `[n]`."""
        at = tokens[:, None]
        place = torch.searchsorted(self.alone, at)
        found = self.alone.gather(1, place.clamp(max=self.alone.shape[1] - 1)) == at
        symbol = torch.where(self.is_rare.gather(1, at), self.p.shape[1] - 1, 2 * place + found)
        return symbol.squeeze(1)

    def lump(self, law: Tensor) -> Tensor:
        """Return another law `[n, V]` over the same symbols."""
        return _lumped(law, self.alone, self.is_rare)


def lump(p: Tensor, q: Tensor | None, *, smallest: float) -> Lumped:
    """Lump laws `[n, V]`, float64, whose rows need not be normalised exactly.

    Args:
        p: The target's.
        q: The draft's, or None.
        smallest: An id with a smaller p counts as impossible.
    """
    step = max(1, BLOCK_VALUES // p.shape[1])
    blocks = [
        _block(p[start : start + step], None if q is None else q[start : start + step], smallest)
        for start in range(0, len(p), step)
    ]
    drafts = [block.q for block in blocks if block.q is not None]
    return Lumped(
        torch.cat([block.p for block in blocks]),
        torch.cat(drafts) if drafts else None,
        torch.cat([block.count for block in blocks]),
        torch.cat([block.alone for block in blocks]),
        torch.cat([block.is_rare for block in blocks]),
    )


def _block(p: Tensor, q: Tensor | None, smallest: float) -> Lumped:
    likely = p if q is None else torch.maximum(p, q)
    alone = likely.topk(ALONE, sorted=False).indices.sort(-1).values
    is_rare = (likely < RARE_MASS / p.shape[1]).scatter_(-1, alone, False)
    count = _lumped((p >= smallest).int(), alone, is_rare).double()
    law = _lumped(p, alone, is_rare)
    is_lump = torch.ones_like(law[0], dtype=torch.bool)
    is_lump[1:-1:2] = False
    law = torch.where(is_lump, law.clamp(min=LEAST_LUMP), law) * (count > 0)
    return Lumped(law, None if q is None else _lumped(q, alone, is_rare), count, alone, is_rare)


def _lumped(values: Tensor, alone: Tensor, is_rare: Tensor) -> Tensor:
    """Sum values `[n, V]` over the ids of each symbol; runs by differences of cumulative sums."""
    common = values * ~is_rare
    sums = common.cumsum(-1, dtype=values.dtype)
    single, upto, total = values.gather(1, alone), sums.gather(1, alone), sums[:, -1:]
    symbols = values.new_empty(len(values), 2 * alone.shape[1] + 2)
    symbols[:, :-1:2] = torch.cat([upto - single, total], 1) - pad(upto, (1, 0))
    symbols[:, 1:-1:2] = single
    symbols[:, -1:] = values.sum(-1, keepdim=True) - total
    return symbols.clamp_(min=0)
