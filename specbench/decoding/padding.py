"""Token lists of unequal length as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def padded(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """Return `[len(rows), longest]` int64, each row filled up with token 0."""
    width = max(map(len, rows), default=0)
    filled = [[*row, *[0] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device=device).reshape(len(rows), width)
