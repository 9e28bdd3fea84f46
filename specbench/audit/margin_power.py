"""What a test with a margin could have found: by direction, on the tokens and pairs that were audited."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from specbench.audit.betting import FloatArray
from specbench.audit.e_process import POWER_Z, MarginProcess, first_crossing
from specbench.audit.paired import WAGERS

STRENGTHS = (
    0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075,
    0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0,
)  # fmt: skip
"""Shares e at which a fault is imagined, from weak to strong."""


def favoured_mass(witness: npt.ArrayLike) -> FloatArray:
    """Return p(A) of each token and direction, given 1[x in A] - p(A); 0 where that is 0 [n, directions].

    A value of 0 means that A is empty or everything: there is nothing to be moved.

    >>> favoured_mass([[0.75, -0.25, 0.0]]).tolist()
    [[0.25, 0.25, 0.0]]
    """
    values = np.asarray(witness, dtype=np.float64)
    return np.asarray(np.where(values > 0, 1 - values, np.abs(values)))


def _room(mass: FloatArray) -> FloatArray:
    """Return how far p(A) can rise: 1 - p(A), or 0 where A is empty."""
    return np.asarray(np.where(mass > 0, 1 - mass, 0.0))


def by_one_arm(witness: npt.ArrayLike, *, margin: float, alpha: float) -> list[float | None]:
    """Return, per direction, the smallest TV per token that `MarginProcess` finds with probability .99.

    The fault that is imagined emits a token of A, in the proportions of p, instead of one from p, in a share
    e of all places: a TV distance of e (1 - p(A)) there, all of it in A. It is found where the expected
    evidence of one stake, less 2.33 standard deviations, reaches log(bets / alpha), as for the e-process.
    None if even e = 1 is not found.

    Args:
        witness: 1[x in A] - p(A) of every scored token [n, directions].
        margin: As in `MarginProcess`.
        alpha: Its level.
    """
    masses = favoured_mass(witness)
    num, directions = masses.shape
    bar = math.log(len(MarginProcess.stakes) * directions / alpha)
    strengths = np.array(STRENGTHS)[:, None]
    found: list[float | None] = []
    for mass in masses.T:
        room = _room(mass)
        moved = mass + strengths * room
        best = np.full(len(STRENGTHS), -np.inf)
        for stake in MarginProcess.stakes:
            inside, outside = np.log1p(stake * (1 - mass - margin)), np.log1p(stake * (-mass - margin))
            growth = (moved * inside + (1 - moved) * outside).sum(1)
            variance = (moved * (1 - moved) * (inside - outside) ** 2).sum(1)
            best = np.maximum(best, growth - POWER_Z * np.sqrt(variance) - bar)
        found.append(first_crossing(np.array(STRENGTHS) * room.sum() / num, best))
    return found


def by_pairs(
    differences: npt.ArrayLike,
    room: npt.ArrayLike,
    tokens: int,
    *,
    scale: npt.ArrayLike,
    allowed: npt.ArrayLike,
    alpha: float,
) -> list[float | None]:
    """Return, per direction, the smallest TV per token that `Paired` finds with probability .99.

    The fault is that of `by_one_arm`. It moves each difference by e times the room of its pair; how
    differences scatter otherwise is taken from those observed, with either sign, so that what was seen
    stands for what equal arms do. Expected evidence less 2.33 standard deviations must reach
    log(bets / alpha).

    Args:
        differences: W_on - W_off of each pair that was bet on, W the sum of 1[x in A] - p(A) over a request
            [pairs, directions].
        room: The sum of 1 - p(A) over the request with speculation [pairs, directions].
        tokens: Of those requests.
        scale: The c of `Paired` [directions].
        allowed: What the pairs were allowed [pairs, 1] or [pairs, directions].
        alpha: Its level.
    """
    seen, rooms = np.asarray(differences, dtype=np.float64), np.asarray(room, dtype=np.float64)
    widths = np.broadcast_to(np.asarray(scale, dtype=np.float64), seen.shape[1:])
    margins = np.broadcast_to(np.asarray(allowed, dtype=np.float64), seen.shape)
    bar = math.log(2 * len(WAGERS) * seen.shape[1] / alpha)
    strengths = np.array(STRENGTHS)[:, None, None]
    found: list[float | None] = []
    for column in range(seen.shape[1]):
        both = np.stack([seen[:, column], -seen[:, column]])
        moved = both + strengths * rooms[:, column] - margins[:, column]
        bets = np.tanh(moved / (2 * widths[column]))
        best = np.full(len(STRENGTHS), -np.inf)
        for wager in WAGERS:
            factors = np.log1p(wager * bets).reshape(len(STRENGTHS), -1)
            growth = len(seen) * factors.mean(1)
            deviation = np.sqrt(len(seen)) * factors.std(1)
            best = np.maximum(best, growth - POWER_Z * deviation - bar)
        found.append(first_crossing(np.array(STRENGTHS) * rooms[:, column].sum() / tokens, best))
    return found
