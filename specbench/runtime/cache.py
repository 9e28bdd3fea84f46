"""The slot cache: where keys and values of a batch live, and who may see them.

A `transformers` cache that holds K and V densely as `[rows, heads, width + 1, dim]` per layer and writes
new entries to explicit (row, slot) places. Nothing is ever cropped: a rejected token lies beyond its
row's length, where no mask reaches it and the next step overwrites it. The last slot is a trash slot for
padding. Memory is zeroed, never left uninitialised: a NaN in a masked slot would poison the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one forward writes and what it reads.

    Rows `first` to `first + num` are in the forward. With `start` given (one row, nothing padded) its
    tokens go to slots `start` onward; otherwise each token goes to its place in `rows` and `slots`, which
    broadcast to the shape of the tokens. Attention reads slots below `span`.
    """

    first: int
    num: int
    span: int
    start: int | None = None
    rows: Tensor | None = None
    slots: Tensor | None = None


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Keys and values by explicit slot. One instance serves one model; layers are allocated on first use."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.width = width
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.placement: Placement | None = None

    def place(self, placement: Placement) -> None:
        """Say where the next forward writes; call before every forward."""
        self.placement = placement

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the entries of a layer; return what its attention may read, `[num, heads, span, dim]`.

        The entries are `[num, heads, R, dim]`, or `[1, heads, T, dim]` when the batch is packed.
        """
        at = self.placement
        assert at is not None, "place() comes before every forward"
        if layer_idx not in self.keys:
            self.keys[layer_idx] = self._allocate(key_states)
            self.values[layer_idx] = self._allocate(value_states)
        rows = slice(at.first, at.first + at.num)
        read = []
        for stored, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            if at.start is not None:
                stored[at.first, :, at.start : at.start + new.shape[2]] = new[0]
            else:
                stored[at.rows, :, at.slots] = new.transpose(1, 2)
            read.append(stored[rows, :, : at.span])
        return read[0], read[1]

    def _allocate(self, states: Tensor) -> Tensor:
        heads, dim = states.shape[1], states.shape[3]
        return torch.zeros(self.rows, heads, self.width + 1, dim, dtype=states.dtype, device=states.device)

    @torch.inference_mode()
    def copy_row(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` slots of a row to others: forked samples, or closing a gap."""
        for stored in (*self.keys.values(), *self.values.values()):
            for target in targets:  # plain copies of slices: indexing by a list takes several times as long
                stored[target, :, :length] = stored[source, :, :length]

    @torch.inference_mode()
    def compact(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Move entries within rows: (row, from slot, to slot). All are read before any is written.

        After a tree was verified the accepted path lies scattered over its slots; this closes the gaps.
        """
        if not moves:
            return
        for stored in (*self.keys.values(), *self.values.values()):
            row, source, target = torch.tensor(moves, device=stored.device).T
            stored[row, :, target] = stored[row, :, source]

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of K and V that one token holds, over the layers used so far."""
        held = (*self.keys.values(), *self.values.values())
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in held)

    # What transformers models may ask of a cache; positions and masks are always passed explicitly.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: models must take positions from `position_ids`, rows have different lengths."""
        del layer_idx
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Return the span a mask would cover, starting at slot 0."""
        del query_length, layer_idx
        return (self.placement.span if self.placement else 0), 0

    @property
    def is_compileable(self) -> bool:
        """Keep `generate`-style automatic compilation out of the way."""
        return False

    def __len__(self) -> int:
        return len(self.keys)
