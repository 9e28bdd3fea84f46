"""Counter-based uniforms: a number is a function of (request seed, purpose, position, round) alone.

A request's output therefore depends on neither its neighbours, nor its row, nor the batch size, and two
purposes never share a number. The hash is the finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast
splittable pseudorandom number generators"), chained over the four fields, in int64 tensor arithmetic,
which wraps as uint64 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a uniform decides. Distinct purposes have independent streams."""

    TARGET = 1  # a token from the target's distribution
    DRAFT = 2  # a token from the draft's distribution
    COIN = 3  # accept or reject
    RESIDUAL = 4  # the recovered token after a rejection


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift logically: `>>` on int64 copies the sign bit, so mask it away."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def stream_keys(seeds: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return one key per seed and purpose, `[B, 5]` int64; column `purpose` starts that stream."""
    seed = torch.tensor([_signed(s % (1 << 64)) for s in seeds], dtype=torch.int64, device=device)
    purposes = torch.arange(len(Purpose) + 1, dtype=torch.int64, device=device)
    return _mix(_mix(seed + _GOLDEN)[:, None] + (purposes + 1) * _GOLDEN)


def uniforms(keys: Tensor, positions: Tensor, rounds: Tensor | None) -> Tensor:
    """Return float64 uniforms in (0, 1), the shape of `positions` `[B, R]`.

    Args:
        keys: one stream per row, `[B]` (a column of `stream_keys`).
        positions: index of the decided token in the request's output, `[B, R]`.
        rounds: `[B]`, or None where the number must not depend on the round.
    """
    x = _mix(keys[:, None] + (positions + 1) * _GOLDEN)
    if rounds is not None:
        x = _mix(x + (rounds + 1)[:, None] * _GOLDEN)
    return (_shift_right(x, 12).to(torch.float64) + 0.5) * 2.0**-52


@dataclass(frozen=True, slots=True)
class RoundRandom:
    """The random numbers of one round of a batch.

    `keys` `[B, 5]` from `stream_keys`; `positions` `[B]`, the output index of the first token this round
    decides; `rounds` `[B]`.
    """

    keys: Tensor
    positions: Tensor
    rounds: Tensor

    def uniform(self, purpose: Purpose, num: int, *, by_round: bool = True) -> Tensor:
        """Return uniforms for `num` consecutive positions, `[B, num]`."""
        offsets = torch.arange(num, dtype=torch.int64, device=self.positions.device)
        positions = self.positions[:, None] + offsets
        return uniforms(self.keys[:, purpose], positions, self.rounds if by_round else None)

    def to(self, device: torch.device) -> RoundRandom:
        """Return the same numbers on another device."""
        if self.keys.device == device:
            return self
        return RoundRandom(self.keys.to(device), self.positions.to(device), self.rounds.to(device))
