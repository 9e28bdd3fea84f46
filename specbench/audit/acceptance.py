"""Accepted draft tokens against their chance of acceptance, which is known before the coin is thrown.

Knows the acceptance probability of each verification rule as a function of p and q at the drafted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from specbench.audit.betting import FloatArray, Mixture
from specbench.audit.verdicts import ComponentResult

RATIO_SCALES = (1.03, 1.1, 1.3)
SLACKS = (0.01, 0.05, 0.2)
FORCED_SHARES = (0.01, 0.1, 0.5)
WAGERS = (0.05, 0.15, 0.4, 0.8)

FLOAT32_TOLERANCE = 1e-4
"""How far an acceptance probability may be off because two float32 forwards of a model differ."""


def probability(p: npt.ArrayLike, q: npt.ArrayLike) -> FloatArray:
    """Return min(1, p / q), the chance that a drafted token is kept.

    Args:
        p: The target's probability of the drafted token; in a tree its current p', after the siblings that
            were rejected before it.
        q: The probability it was drafted with. 1 where the draft is a point mass, and for exact-match
            verification: the chance is then p. In a tree its current q'.

    >>> probability([0.2, 0.5, 0.3], [0.4, 0.25, 1.0]).tolist()
    [0.5, 1.0, 0.3]
    """
    target, draft = _probabilities(p, q)
    ratio = np.divide(target, draft, out=np.where(target > 0, 1.0, 0.0), where=draft > 0)
    return np.minimum(1.0, ratio)


def block_expectation(p: npt.ArrayLike, q: npt.ArrayLike, offered: npt.ArrayLike) -> FloatArray:
    """Return the expected accepted length of block verification, the sum of rho_i per round [rounds].

    rho_i = min(1, rho_{i-1} p_i / q_i) with rho_0 = 1 is the chance that at least i tokens are kept, taken
    over the coins and over what is drafted after token i (their p_i in the paper).

    Args:
        p: The target's probabilities of the drafted tokens [rounds, k].
        q: The draft's [rounds, k].
        offered: How many of the k were drafted [rounds].

    References:
        Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444, algorithm 2.
    """
    target, draft = _probabilities(p, q)
    counts = np.asarray(offered, dtype=np.int64)
    rho = np.ones(len(target))
    total = np.zeros(len(target))
    for place in range(target.shape[1]):
        drafted = counts > place
        above, below = rho[drafted] * target[drafted, place], draft[drafted, place]
        rho[drafted] = probability(np.minimum(above, 1.0), below)
        total[drafted] += rho[drafted]
    return total


class TokenAcceptance:
    """An e-process that grows when draft tokens are accepted more or less often than they should be.

    Null hypothesis: given everything before its coin, including the draft token itself, a tested token is
    accepted with probability c = min(1, p / q), known to within `tolerance`. The sum of accepted - c over
    tested positions is then a martingale. The bets are likelihood ratios of other acceptance probabilities:
    the ratio scaled either way, a slack added, a share accepted or rejected whatever it is. Each is taken
    against the end of [c - tolerance, c + tolerance] nearest to it, so that no c in there lets it grow.

    Tested are the positions up to and including the first rejection of a round; those after it have no
    coin. In a tree the siblings are tested in turn, each with its current p' and q'.

    Invalid when p or q come from another context or precision than the coin saw, when q is not what the token
    was drawn from in truth (see `proposals`), or when positions were chosen by their outcome.

    No alarm does not show that the output is right: what is emitted after a rejection is not looked at, nor
    are draft tokens that are not worth testing (c = 1 tells little).

    References:
        Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318; trees: SpecInfer,
        arXiv 2305.09781.

    >>> coins = TokenAcceptance(alpha=0.001)
    >>> coins.add([True] * 40, [0.3] * 40, [0.5] * 40)
    >>> (coins.result().alarm, round(coins.z, 1))
    (True, 5.2)
    """

    def __init__(self, alpha: float, *, tolerance: float = FLOAT32_TOLERANCE) -> None:
        if not 0 <= tolerance < 0.5:
            raise ValueError(f"tolerance is {tolerance}; expected 0 or more, below .5")
        raised = [f"ratio x {s:g}" for s in RATIO_SCALES] + [f"slack + {s:g}" for s in SLACKS]
        raised += [f"{s:g} accepted unseen" for s in FORCED_SHARES]
        lowered = [f"ratio / {s:g}" for s in RATIO_SCALES] + [f"slack - {s:g}" for s in SLACKS]
        lowered += [f"{s:g} rejected unseen" for s in FORCED_SHARES]
        self.mixture = Mixture(raised + lowered, alpha)
        self.tolerance = max(tolerance, 1e-9)  # so that a certain outcome that fails to come is finite
        self.excess = 0.0
        self.variance = 0.0

    def add(self, accepted: npt.ArrayLike, p: npt.ArrayLike, q: npt.ArrayLike) -> None:
        """Take in tested positions in the order of their coins: outcome, p and q at the token, each [n]."""
        outcome = np.asarray(accepted, dtype=bool)
        target, draft = _probabilities(p, q)
        chance = probability(target, draft)
        if outcome.shape != chance.shape:
            raise ValueError(f"{outcome.shape} outcomes for probabilities of shape {chance.shape}")
        ratio = np.divide(target, draft, out=chance.copy(), where=draft > 0)
        self.excess += float((outcome - chance).sum())
        self.variance += float((chance * (1 - chance)).sum())

        upper, lower = np.minimum(1.0, chance + self.tolerance), np.maximum(0.0, chance - self.tolerance)
        raised = [np.minimum(1.0, ratio * scale) for scale in RATIO_SCALES]
        raised += [np.minimum(1.0, chance + slack) for slack in SLACKS]
        raised += [chance + share * (1 - chance) for share in FORCED_SHARES]
        lowered = [np.minimum(1.0, ratio / scale) for scale in RATIO_SCALES]
        lowered += [np.maximum(0.0, chance - slack) for slack in SLACKS]
        lowered += [chance * (1 - share) for share in FORCED_SHARES]
        bets = [_log_factor(outcome, upper, np.maximum(upper, other)) for other in raised]
        bets += [_log_factor(outcome, lower, np.minimum(lower, other)) for other in lowered]
        self.mixture.multiply(np.stack(bets, axis=1))

    def state(self) -> dict[str, Any]:
        """Return everything needed to go on later, in JSON types."""
        return {
            "mixture": self.mixture.state(),
            "excess": self.excess,
            "variance": self.variance,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.mixture.restore(state["mixture"])
        self.excess, self.variance = state["excess"], state["variance"]

    @property
    def z(self) -> float:
        """Return the sum of accepted - c over its standard deviation: for display, not for the verdict."""
        return self.excess / math.sqrt(self.variance) if self.variance > 0 else 0.0

    def result(self) -> ComponentResult:
        """Return what was found so far; tokens are tested draft tokens."""
        return _component(self.mixture, self.excess, self.z, "tested draft tokens")


class BlockAcceptance:
    """The same for block verification, per round: accepted length against the sum of rho_i.

    Null hypothesis: given everything before the draft of a round, accepted length - sum rho_i has mean 0,
    to within `tolerance` per offered token. It lies in [-k, k], k the longest draft, so
    1 + l (difference / k -+ tolerance) is a bet for any |l| below 1 - tolerance: l in +-{.05 .15 .4 .8}.
    A draft may stop for what it drafted, as long as the token that stops it is offered: the terms of the sum
    then still have mean 0, one after the other.

    Invalid when a token was dropped for what it is, besides what makes `TokenAcceptance` invalid. No alarm
    says nothing about what is emitted after the block.

    References:
        Sun et al., arXiv 2403.10444; Waudby-Smith and Ramdas, "Estimating means of bounded random
        variables by betting", JRSS B 86 (2024).
    """

    def __init__(self, alpha: float, *, longest: int, tolerance: float = FLOAT32_TOLERANCE) -> None:
        if longest < 1:
            raise ValueError(f"the longest draft is {longest}; expected 1 or more")
        if not 0 <= tolerance < 0.2:
            raise ValueError(f"tolerance is {tolerance}; expected 0 or more, below .2")
        self.mixture = Mixture([f"{sign}{wager:g}" for sign in "+-" for wager in WAGERS], alpha)
        self.longest = longest
        self.tolerance = tolerance
        self.excess = 0.0
        self.variance = 0.0
        self.tested = 0

    def add(self, lengths: npt.ArrayLike, expected: npt.ArrayLike, offered: npt.ArrayLike) -> None:
        """Take in rounds in order, each [n]: accepted length, sum of rho_i, tokens offered (1 or more)."""
        difference = np.asarray(lengths, dtype=np.float64) - np.asarray(expected, dtype=np.float64)
        counts = np.asarray(offered, dtype=np.int64)
        fits = (counts >= 1) & (counts <= self.longest) & (np.abs(difference) <= counts)
        if not np.all(fits):
            raise ValueError("a round offered nothing or too much, or accepted more than it offered")
        self.excess += float(difference.sum())
        self.variance += float((difference**2).sum())
        self.tested += int(counts.sum())
        wagers = np.array(WAGERS)
        share = (difference / self.longest)[:, None]
        upward = np.log1p(wagers * (share - self.tolerance))
        downward = np.log1p(-wagers * (share + self.tolerance))
        self.mixture.multiply(np.concatenate([upward, downward], axis=1))

    def state(self) -> dict[str, Any]:
        """Return everything needed to go on later, in JSON types."""
        return {
            "mixture": self.mixture.state(),
            "excess": self.excess,
            "variance": self.variance,
            "tested": self.tested,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.mixture.restore(state["mixture"])
        self.excess, self.variance = state["excess"], state["variance"]
        self.tested = state["tested"]

    @property
    def z(self) -> float:
        """Return the sum of differences over the root of the sum of their squares: for display only."""
        return self.excess / math.sqrt(self.variance) if self.variance > 0 else 0.0

    def result(self) -> ComponentResult:
        """Return what was found so far; tokens are offered draft tokens."""
        return _component(self.mixture, self.excess, self.z, "rounds", tokens=self.tested)


def _probabilities(p: npt.ArrayLike, q: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    target, draft = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    for name, values in (("p", target), ("q", draft)):
        if not np.all((values >= 0) & (values <= 1 + 1e-6)):
            raise ValueError(f"{name} holds a value that is no probability")
    if target.shape != draft.shape:
        raise ValueError(f"p has shape {target.shape}, q {draft.shape}; expected the same")
    return target, draft


def _log_factor(outcome: npt.NDArray[np.bool_], null: FloatArray, other: FloatArray) -> FloatArray:
    """Return the log likelihood ratio of two chances of acceptance, 1 % of the null mixed into the other."""
    mixed = 0.99 * other + 0.01 * null
    above = np.where(outcome, mixed, 1 - mixed)
    below = np.where(outcome, null, 1 - null)
    # Where the null's end is 0 or 1 and the other equals it, the bet is off.
    return np.log(np.divide(above, below, out=np.ones_like(above), where=below > 0))


def _component(
    mixture: Mixture, excess: float, z: float, units: str, tokens: int | None = None
) -> ComponentResult:
    direction = "more" if excess > 0 else "fewer"
    counted = f"{abs(excess):.1f} {direction} accepted than expected over {mixture.steps} {units}, z {z:+.1f}"
    return mixture.component(
        "acceptance",
        mixture.steps if tokens is None else tokens,
        found=f"{counted} (most like {mixture.best})",
        quiet=counted,
    )
