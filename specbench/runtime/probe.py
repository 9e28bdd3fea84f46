"""The load-time probe: does the slot cache reproduce this model? Asked of the model, not of a class list.

Ragged rows go through a fixed history of accepted and rejected tokens and are compared with plain forwards
without a cache. Recurrent state and relative attention biases fail here, and are refused with a message.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from specbench.errors import ModelError
from specbench.runtime import attention
from specbench.runtime.cache import SlotCache
from specbench.runtime.runner import ModelRunner, decoder_layers

# Per row: tokens committed in each of four rounds, and tokens offered in each.
_HISTORY = (
    ((5, 5), (1, 3), (4, 4), (2, 4)),
    ((2, 2), (3, 3), (1, 4), (1, 1)),
    ((7, 7), (1, 2), (1, 3), (3, 3)),
)
_LARGEST_WINDOW = 256
_SHORTEST_CONTEXT = max(sum(committed for committed, _ in row) for row in _HISTORY) + 8


@dataclass(frozen=True, slots=True)
class Probe:
    """What the probe found: the attention in use, and the largest logit difference over their spread."""

    attention: str
    difference: float
    tolerance: float


@torch.inference_mode()
def _difference(model: Any, plain: list[torch.Tensor], sequences: list[list[int]], padding: int) -> float:
    """Return the largest logit difference from `plain` `[len, V]` per row, in units of their spread."""
    rows = len(sequences)
    runner = ModelRunner(model, SlotCache(rows, max(map(len, sequences)) + 8))
    device = model.device
    held = [0] * rows
    worst = 0.0
    scale = max(float(torch.cat(plain).float().std()), 1e-6)
    for number in range(len(_HISTORY[0])):
        committed = [history[number][0] + (padding if number == 0 else 0) for history in _HISTORY]
        offered = [history[number][1] + (padding if number == 0 else 0) for history in _HISTORY]
        tokens = torch.zeros(rows, max(offered), dtype=torch.int64)
        for row in range(rows):
            chunk = sequences[row][held[row] : held[row] + committed[row]]
            # What is offered beyond what is committed is a wrong token: it must leave no trace.
            wrong = [(t + 1) % 7 for t in range(offered[row] - committed[row])]
            tokens[row, : offered[row]] = torch.tensor(chunk + wrong)
        output = runner.forward(tokens.to(device), held, offered)
        for row in range(rows):
            got = output.logits[row, : committed[row]].float()
            want = plain[row][held[row] : held[row] + committed[row]].float()
            difference = float((got - want).abs().max()) / scale
            worst = max(worst, difference if difference == difference else float("inf"))
            held[row] += committed[row]
    return worst


def plain_twin(model: Any) -> Any:
    """Return a model of the same weights whose plain forwards are those of transformers.

    Under `slot_attention` transformers builds no masks, so a forward that does not come from a `ModelRunner`
    would see beyond a sliding window.
    """
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    if twin.config._attn_implementation == attention.NAME:
        try:
            twin.set_attn_implementation("sdpa")
        except ValueError:  # transformers says so where a model has none
            twin.set_attn_implementation("eager")
    return twin


@torch.inference_mode()
def probe(model: Any) -> Probe:
    """Choose the attention under which the slot cache reproduces `model`, and set it.

    Raises:
        ModelError: under none of them does it.
    """
    text = model.config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and longest < _SHORTEST_CONTEXT:
        raise ModelError(
            f"the model's context of {longest} tokens is too short to decode with",
            hint=f"specbench needs a context of at least {_SHORTEST_CONTEXT} tokens",
        )
    window = getattr(text, "sliding_window", None) or 0
    padding = window if window <= _LARGEST_WINDOW else 0
    if longest is not None:  # a window that the context hardly exceeds is crossed as far as it can be
        padding = min(padding, longest - _SHORTEST_CONTEXT)
    generator = torch.Generator().manual_seed(0)
    lengths = [padding + sum(committed for committed, _ in row) for row in _HISTORY]
    sequences = [torch.randint(0, text.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    original = model.config._attn_implementation
    reference = plain_twin(model)
    plain = [
        reference(input_ids=torch.tensor([s], device=model.device), use_cache=False).logits[0]
        for s in sequences
    ]
    # A wrong mask or position moves logits by about their spread. bfloat16 rounds differently by width.
    tolerance = {torch.float32: 1e-3, torch.float64: 1e-6}.get(model.dtype, 0.35)
    reasons = []
    try:
        decoder_layers(model)
    except ValueError as problem:
        raise ModelError(f"{type(model).__name__} cannot be decoded in process: {problem}") from None
    for name in dict.fromkeys((attention.NAME, original, "eager")):
        try:
            model.set_attn_implementation(name)
            difference = _difference(model, plain, sequences, padding)
        except Exception as problem:  # noqa: BLE001  # any failure means: not under this attention
            reasons.append(f"{name}: {type(problem).__name__}")
            continue
        if difference <= tolerance:
            return Probe(name, difference, tolerance)
        reasons.append(f"{name}: logits off by {difference:.2g} of their spread")
    model.set_attn_implementation(original)
    raise ModelError(
        f"{type(model).__name__} cannot be decoded in process: its cached logits differ from its uncached "
        f"ones ({'; '.join(reasons)})",
        hint="models with recurrent state or relative attention biases need a real engine",
    )
