"""Attention over slots: scaled dot products in which grouped query heads share K and V without a copy.

Registered with transformers under a name of its own; models stay unmodified. The heads of one group are
laid side by side as extra query rows, so a masked batch needs neither `repeat_kv` (which copies the whole
cache every step) nor a kernel that knows about groups. A ragged batch reaches the model packed, without
padding, as real engines do it; only here is it unfolded into rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "specbench_slots"

_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "alibi")


class UnsupportedAttention(Exception):
    """The model's attention has a term that this function does not compute."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How T packed tokens are laid out as B rows of R.

    `unfold` `[B, R]` gives the packed index of each place (0 where there is none); `fold` `[T]` the place
    b * R + r of each packed token.
    """

    unfold: Tensor
    fold: Tensor


_packing: Packing | None = None
_packed_mask: tuple[int, Tensor, Tensor] | None = None


def _pack_mask(mask: Tensor, groups: int) -> Tensor:
    """Repeat a `[B, 1, R, S]` mask for the rows of each group; one step's layers share the result."""
    global _packed_mask  # a cache of one entry
    if _packed_mask is None or _packed_mask[1] is not mask or _packed_mask[0] != groups:
        _packed_mask = (groups, mask, mask.repeat(1, 1, groups, 1))
    return _packed_mask[2]


@contextmanager
def packed(packing: Packing | None) -> Iterator[None]:
    """Run a forward whose tokens are packed into one sequence."""
    global _packing
    _packing = packing
    try:
        yield
    finally:
        _packing = None


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' sdpa does. `query` `[B, H, R, D]`, `key` and `value` `[B, H / groups, S, D]`.

    Without a mask a single query sees every slot, and several queries are a prefill from slot 0: causal.
    """
    del module, dropout
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedAttention(name)
    if _packing is not None:
        query = query[0].transpose(0, 1)[_packing.unfold].transpose(1, 2)
    batch, heads, num, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    if attention_mask is None and num > 1:
        # A prefill: the flash kernel wants equal head counts, and happens once per request.
        if groups > 1:
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        out = scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True)
        return _folded(out), None
    if groups > 1:
        query = query.reshape(batch, kv_heads, groups * num, dim)
        if attention_mask is not None and num > 1:
            attention_mask = _pack_mask(attention_mask, groups)
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    out = out.reshape(batch, heads, num, out.shape[-1])
    return _folded(out), None


def _folded(out: Tensor) -> Tensor:
    """Return `[B, H, R, D]` as transformers wants it: `[B, R, H, D]`, or packed `[1, T, H, D]`."""
    out = out.transpose(1, 2)
    if _packing is None:
        return out.contiguous()
    return out.flatten(0, 1)[_packing.fold][None]


ALL_ATTENTION_FUNCTIONS.register(NAME, slot_attention)
