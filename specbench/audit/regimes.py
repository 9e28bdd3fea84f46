"""Synthetic drafts of a wanted acceptance, for any target: its own logits plus noise set by position.

Each fault shows only where it is exercised (AUDIT.md, three draft regimes): a bonus row needs drafts that
are accepted in full, a residual needs rejections. The noise is one fixed vector over token ids, rolled by
position, so that the draft's law can be computed again at every prefix, also where nothing was drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

ACCEPTANCE = {"self": 1.0, "good": 0.7, "bad": 0.25}
"""The acceptance that each regime is calibrated to, sum of min(p, q) on average."""

SEED = 20_221_117
LARGEST_SCALE = 64.0
"""At this scale the noise alone decides and the acceptance is about 1 / vocabulary."""


@lru_cache(maxsize=4)
def _noise(vocab: int) -> Tensor:
    """The fixed vector, standard normal, made on the CPU so that every device has the same."""
    return torch.randn(vocab, generator=torch.Generator().manual_seed(SEED))


def draft_logits(logits: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Return the synthetic draft's logits; the caller processes them as it does the target's.

    A pure function of one row and its position: no state, no random numbers, the same in any batch.

    Args:
        logits: The target's, unprocessed, `[..., V]`.
        positions: Place in the sequence of the token that each row predicts, `[...]`, int64.
        scale: Standard deviation of the noise; 0 is the target itself. See `calibrate`.
    """
    if scale == 0:
        return logits
    vocab = logits.shape[-1]
    twice = (scale * _noise(vocab)).to(logits.device, logits.dtype).repeat(2)
    rolled = twice.unfold(0, vocab, 1)[vocab - positions.to(logits.device).remainder(vocab)]
    return logits + rolled


def acceptance(
    logits: Tensor, positions: Tensor, scale: float, process: Callable[[Tensor], Tensor] | None = None
) -> float:
    """Return the mean of sum min(p, q) over rows: the chance that rejection sampling keeps a draft token."""
    law = process or _softmax
    return float(torch.minimum(law(logits), law(draft_logits(logits, positions, scale))).sum(-1).mean())


def calibrate(
    logits: Tensor,
    wanted: float,
    *,
    process: Callable[[Tensor], Tensor] | None = None,
    steps: int = 20,
) -> float:
    """Find the scale of the noise at which a draft token is accepted with the wanted probability.

    The scale must be fixed before the audit, on logits that are not audited themselves (of the prompts, or
    of a warm-up): it may then depend on anything.

    Args:
        logits: A sample of target logits, `[num, V]`; a few hundred rows suffice.
        wanted: Mean acceptance; 1 gives 0, and what cannot be reached gives the largest scale.
        process: Turns logits into the sampling distribution; plain softmax if None.
        steps: Of the bisection.
    """
    if not 0 < wanted <= 1:
        raise ValueError(f"an acceptance of {wanted} was asked for; expected more than 0 and at most 1")
    if wanted == 1:
        return 0.0
    positions = torch.arange(len(logits))
    low, high = 0.0, LARGEST_SCALE
    for _ in range(steps):
        middle = (low + high) / 2
        if acceptance(logits, positions, middle, process) > wanted:
            low = middle
        else:
            high = middle
    return high


def _softmax(logits: Tensor) -> Tensor:
    return logits.double().softmax(-1)
