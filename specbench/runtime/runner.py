"""Running an unmodified HF causal LM over a slot cache: tokens and lengths in, logits out.

The only file that knows how transformers names its arguments, how masks are built for full and sliding
attention, and how to run the first layers of a model alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from specbench.runtime import attention
from specbench.runtime.cache import Placement, SlotCache
from specbench.runtime.stopwatch import Mark, Stopwatch


@dataclass(frozen=True, slots=True)
class Output:
    """Logits `[num, R, V]` (R = 1 where only one row each was asked for), and captured hidden states.

    `tokens_sent` counts the tokens the model computed, padding included.
    """

    logits: Tensor
    features: dict[int, Tensor]
    tokens_sent: int


@dataclass(frozen=True, slots=True)
class TreeWindow:
    """A forward over tokens that form trees: they occupy consecutive slots, but not consecutive positions.

    The tree of each row fills W slots; the forward computes R of them, from the `offset`-th on, the earlier
    ones having been computed before. `depths` `[num, W]` is added to the slot where a row's tree begins to
    give each token's position; `visible` `[num, R, W]` says which tokens of the tree each computed one
    attends to, itself included. What lies before the tree is visible to all of it.
    """

    depths: Tensor
    visible: Tensor
    offset: int = 0

    @classmethod
    def to_verify(cls, ancestors: Tensor) -> TreeWindow:
        """Make the window of a verification: the last committed token, then N nodes.

        `ancestors` `[num, N + 1, N]` as `processing.ancestors` gives them.
        """
        last = ancestors.new_ones((*ancestors.shape[:-1], 1))
        return cls(ancestors.sum(-1), torch.cat([last, ancestors], -1))


class ModelRunner:
    """One model, its cache, and its clock.

    Args:
        model: an HF causal LM in eval mode.
        cache: its slot cache; runners of a model's first layers share it.
        num_layers: run only the first layers, then the final norm and head (early exit).
    """

    def __init__(self, model: Any, cache: SlotCache, *, num_layers: int | None = None) -> None:
        self.model = model
        self.cache = cache
        self.num_layers = num_layers
        self.device: torch.device = model.device
        self.stopwatch = Stopwatch(self.device)
        self.forwards: list[tuple[Mark, Mark]] = []
        self.owns_attention = model.config._attn_implementation == attention.NAME
        parameters = inspect.signature(model.forward).parameters
        # `past_key_values` is called `cache` from transformers 5.24 on.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters
        text = model.config.get_text_config(decoder=True)
        layer_types = getattr(text, "layer_types", None) or []
        self._window: int | None = getattr(text, "sliding_window", None)
        self._mask_kinds = set(layer_types)
        if self._mask_kinds == {"full_attention"}:
            self._window = None
        self._mask_by_kind = "sliding_attention" in self._mask_kinds
        self.vocab = int(model.get_output_embeddings().weight.shape[0])
        self.vocab_read = int(model.get_input_embeddings().weight.shape[0])
        self.max_context: int | None = getattr(text, "max_position_embeddings", None)

    def first_layers(self, num_layers: int) -> ModelRunner:
        """Return a runner of the first layers, sharing weights and cache."""
        return ModelRunner(self.model, self.cache, num_layers=num_layers)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        first_row: int = 0,
        keep: Sequence[int] | None = None,
        feature_layers: Sequence[int] = (),
        tree: TreeWindow | None = None,
    ) -> Output:
        """Run one forward.

        Args:
            tokens: `[num, R]`; row b holds `counts[b]` tokens, the rest is padding.
            starts: slots already held by each row; its tokens go to the slots from there on.
            counts: valid tokens of each row.
            first_row: cache row of the first entry.
            keep: index of the one position of each row whose logits are wanted; None for all.
            feature_layers: layers whose output hidden states are wanted.
            tree: positions and visibility of the tokens, where they are not a run; `starts` then is where
                the computed tokens go.
        """
        begin = self.stopwatch.mark()
        num, width = tokens.shape
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        span = max(ends)
        ragged = any(count < width for count in counts)
        offsets = torch.arange(width, device=self.device)
        packing: attention.Packing | None = None
        first_slots = torch.tensor(starts, device=self.device)[:, None]
        slots = first_slots + offsets
        positions = slots
        if tree is not None:
            positions = first_slots + tree.depths[:, tree.offset : tree.offset + width] - tree.offset
        if num == 1 and not ragged:
            placement = Placement(first_row, num, span, start=starts[0])
        else:
            rows = torch.arange(first_row, first_row + num, device=self.device)[:, None]
            if ragged:
                valid = offsets < torch.tensor(counts, device=self.device)[:, None]
                if self.owns_attention:
                    packing = _pack(valid, sum(counts))
                    rows, slots = rows.expand_as(valid)[valid][None], slots[valid][None]
                else:
                    slots = torch.where(valid, slots, self.cache.width)
            placement = Placement(first_row, num, span, rows=rows, slots=slots)
        self.cache.place(placement)
        mask = self._mask(positions, span, starts, width, tree)
        if packing is not None:
            tokens, positions = tokens[valid][None], positions[valid][None]
        if self.max_context is not None:
            positions = positions.clamp(max=self.max_context - 1)
        arguments: dict[str, Any] = {self._cache_argument: self.cache, "use_cache": True}
        wanted = self._logits_wanted(keep, counts, packing)
        if wanted is not None:
            arguments["logits_to_keep"] = wanted
        with self._running(feature_layers) as features, attention.packed(packing):
            result = self.model(
                input_ids=tokens, attention_mask=mask, position_ids=positions, return_dict=True, **arguments
            )
        logits: Tensor = result.logits
        if packing is not None:
            features = {layer: states[0][packing.unfold] for layer, states in features.items()}
            logits = logits[0][packing.unfold] if wanted is None else logits[0][:, None]
        if keep is not None and (packing is None or wanted is None):
            at = torch.tensor(list(keep), device=self.device)
            if wanted is not None:
                at = torch.searchsorted(wanted, at)
            logits = logits[torch.arange(num, device=self.device), at][:, None]
        self.forwards.append((begin, self.stopwatch.mark()))
        return Output(logits, features, tokens.numel())

    def _logits_wanted(
        self, keep: Sequence[int] | None, counts: Sequence[int], packing: attention.Packing | None
    ) -> Tensor | None:
        """Return the places of a sequence whose logits the model should compute; None for all.

        Packed, these are exactly the rows asked for. Otherwise the model takes one list for all rows.
        """
        if keep is None or not self._keeps_logits:
            return None
        if packing is None:
            return torch.tensor(sorted(set(keep)), device=self.device)
        before = [0, *accumulate(counts)]
        return torch.tensor([b + k for b, k in zip(before, keep, strict=False)], device=self.device)

    def _mask(
        self, positions: Tensor, span: int, starts: Sequence[int], width: int, tree: TreeWindow | None
    ) -> Any:
        """Return what the model takes as `attention_mask`: a 4-D mask, one per kind of layer, or None."""
        sees_all = (
            self.owns_attention
            and tree is None
            and ((len(starts) == 1 and width == 1) or (max(starts) == 0 and span == width))
        )
        windowed = self._window is not None and span > self._window
        if sees_all and not windowed:
            if self._mask_by_kind:
                return dict.fromkeys(self._mask_kinds)
            return None
        # The position held by each slot: its number, but for the tokens of a tree.
        held = torch.arange(span, device=self.device)[None, None]
        if tree is None:
            causal = held <= positions[..., None]
        else:
            begin = torch.tensor(starts, device=self.device) - tree.offset
            causal, held = _tree_mask(tree, begin, held)
        if not self._mask_by_kind:
            if self._window is not None:
                causal = causal & (held > positions[..., None] - self._window)
            return self._as_model_wants(causal)
        full = self._as_model_wants(causal)
        masks = dict.fromkeys(self._mask_kinds, full)
        if windowed:
            assert self._window is not None
            near = causal & (held > positions[..., None] - self._window)
            masks["sliding_attention"] = self._as_model_wants(near)
        return masks

    def _as_model_wants(self, allowed: Tensor) -> Tensor:
        """Turn `[num, R, span]` booleans into a 4-D mask: additive for eager attention, else boolean.

        A boolean mask with eager attention is silently wrong: it would be added.
        """
        allowed = allowed[:, None]
        if self.model.config._attn_implementation != "eager":
            return allowed
        lowest = torch.finfo(self.model.dtype).min
        return torch.zeros_like(allowed, dtype=self.model.dtype).masked_fill(~allowed, lowest)

    @contextmanager
    def _running(self, feature_layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Run the first layers only, if so asked, and capture the hidden states wanted."""
        features: dict[int, Tensor] = {}
        if self.num_layers is None and not feature_layers:
            yield features
            return
        parent, name = decoder_layers(self.model)
        layers: nn.ModuleList = getattr(parent, name)
        hooks = []
        for index in feature_layers:

            def capture(_: nn.Module, __: Any, output: Any, index: int = index) -> None:
                features[index] = output[0] if isinstance(output, tuple) else output

            hooks.append(layers[index].register_forward_hook(capture))
        if self.num_layers is not None:
            parent._modules[name] = layers[: self.num_layers]
        try:
            yield features
        finally:
            parent._modules[name] = layers
            for hook in hooks:
                hook.remove()


def _tree_mask(tree: TreeWindow, begin: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each token of the forward sees, `[num, R, span]`, and the position of each slot.

    `begin` `[num]` is where each row's tree begins. Positions are `[num, 1, span]`.
    """
    num, computed, size = tree.visible.shape
    begin = begin[:, None, None]
    inside = slots - begin
    place = inside.clamp(0, size - 1)
    seen = tree.visible.gather(2, place.expand(num, computed, -1))
    mask = (inside < 0) | ((inside < size) & seen)
    depth = tree.depths.gather(1, place[:, 0])[:, None]
    return mask, torch.where(inside < 0, slots, begin + depth)


def _pack(valid: Tensor, total: int) -> attention.Packing:
    """Return the packing of the `[num, R]` places that hold one of `total` tokens."""
    unfold = (valid.flatten().cumsum(0) - 1).reshape(valid.shape).masked_fill(~valid, 0)
    places = torch.arange(valid.numel(), device=valid.device)[valid.flatten()]
    assert len(places) == total
    return attention.Packing(unfold, places)


def decoder_layers(model: Any) -> tuple[nn.Module, str]:
    """Find the list of decoder layers: its parent module and the name under which it hangs there."""
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                return parent, name
    raise ValueError(f"{type(model).__name__} has no list of {depth} decoder layers")
