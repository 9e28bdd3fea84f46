"""Attention over slots: scaled dot products in which grouped query heads share K and V without a copy.

Registered with transformers under a name of its own; models stay unmodified. The heads of one group are
laid side by side as extra query rows, so a masked batch needs neither `repeat_kv` (which copies the whole
cache every step) nor a kernel that knows about groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "specbench_slots"

_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "alibi")


class UnsupportedAttention(Exception):
    """The model's attention has a term that this function does not compute."""


_packed_mask: tuple[int, int, Tensor, Tensor] | None = None


def _pack_mask(mask: Tensor, groups: int) -> Tensor:
    """Repeat a `[B, 1, R, S]` mask for the rows of each group; one step's layers share the result."""
    global _packed_mask  # a cache of one entry; the mask it holds keeps the id valid
    if _packed_mask is None or _packed_mask[2] is not mask or _packed_mask[1] != groups:
        _packed_mask = (id(mask), groups, mask, mask.repeat(1, 1, groups, 1))
    return _packed_mask[3]


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
    batch, heads, num, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    if attention_mask is None and num > 1:
        # A prefill: the flash kernel wants equal head counts, and happens once per request.
        if groups > 1:
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        out = scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True)
        return out.transpose(1, 2).contiguous(), None
    if groups > 1:
        query = query.reshape(batch, kv_heads, groups * num, dim)
        if attention_mask is not None and num > 1:
            attention_mask = _pack_mask(attention_mask, groups)
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    out = out.reshape(batch, heads, num, out.shape[-1])
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, slot_attention)
