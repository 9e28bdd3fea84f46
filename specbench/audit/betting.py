"""An equal-weight average of e-processes and its running maximum: how the sequential companions alarm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specbench.audit.verdicts import ComponentResult

FloatArray = npt.NDArray[np.float64]


class Mixture:
    """Several bets against one null hypothesis, each with an equal share of the stake.

    Null hypothesis: given everything earlier, each factor of each bet has expectation at most 1. Then the
    average of the running products is an e-process: the chance that it ever reaches 1 / alpha is at most
    alpha, whenever one stops looking (Ville's inequality). So the alarm is on the running maximum, and it
    stays.

    Invalid when a bet was chosen after seeing what it is about, or when factors are left out for how they
    turned out. A small maximum does not show that the null is true: only that these bets did not pay.

    References:
        Ville, Étude critique de la notion de collectif (1939); Ramdas et al., Statistical Science 38 (2023).

    >>> coin = Mixture(["heads", "tails"], alpha=0.05)
    >>> coin.multiply(np.log([[1.6, 0.4]] * 8))  # eight heads; each bet 60 % of its stake
    >>> (coin.alarm, coin.alarm_at, coin.best)
    (True, 8, 'heads')
    """

    def __init__(self, names: Sequence[str], alpha: float) -> None:
        if not 0 < alpha < 1:
            raise ValueError(f"alpha is {alpha}; expected a number between 0 and 1")
        self.names = tuple(names)
        self.alpha = alpha
        self.log_e: FloatArray = np.zeros(len(self.names))
        self.peak = 0.0
        self.steps = 0
        self.alarm_at: int | None = None

    def multiply(self, log_factors: npt.ArrayLike) -> None:
        """Take in the log factors of some steps in order [steps, bets]; -inf ends a bet, +inf is refused."""
        factors = np.asarray(log_factors, dtype=np.float64).reshape(-1, len(self.names))
        if not np.all(factors < np.inf):  # also refuses NaN
            raise ValueError("a log factor is not a number or is infinite")
        if not len(factors):
            return
        paths = self.log_e + factors.cumsum(0)
        mixture = np.logaddexp.reduce(paths, axis=1) - math.log(len(self.names))
        if self.alarm_at is None and (reached := np.flatnonzero(mixture >= self.threshold)).size:
            self.alarm_at = self.steps + int(reached[0]) + 1
        self.log_e = paths[-1]
        self.peak = max(self.peak, float(mixture.max()))
        self.steps += len(factors)

    def state(self) -> dict[str, Any]:
        """Return everything needed to go on later, in JSON types."""
        ended = [None if value == -math.inf else float(value) for value in self.log_e]
        return {"log_e": ended, "peak": self.peak, "steps": self.steps, "alarm_at": self.alarm_at}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state of the same bets."""
        if len(state["log_e"]) != len(self.names):
            raise ValueError(f"{len(state['log_e'])} bets were saved; expected {len(self.names)}")
        self.log_e = np.array([-math.inf if value is None else value for value in state["log_e"]])
        self.peak, self.steps, self.alarm_at = state["peak"], state["steps"], state["alarm_at"]

    @property
    def threshold(self) -> float:
        """Return the log e-value from which this alarms."""
        return -math.log(self.alpha)

    @property
    def alarm(self) -> bool:
        """Return whether the average has ever reached 1 / alpha."""
        return self.alarm_at is not None

    @property
    def best(self) -> str:
        """Return the bet with the most evidence now."""
        return self.names[int(np.argmax(self.log_e))]

    def component(self, name: str, tokens: int, *, found: str, quiet: str) -> ComponentResult:
        """Return the result in the form of a component, `found` or `quiet` before its evidence."""
        if not self.steps:
            return ComponentResult(
                name, False, None, "log e", self.alpha, tokens, "nothing was tested", conclusive=False
            )
        sign = "at or above" if self.alarm else "below"
        words = f"{found if self.alarm else quiet}: log e {self.peak:.1f}, {sign} {self.threshold:.1f}"
        return ComponentResult(name, self.alarm, self.peak, "log e", self.alpha, tokens, words)


RARE_RATES = (1e-3, 1e-2, 0.1, 0.5)


def rare_event_mixture(alpha: float) -> Mixture:
    """Return the bets that something rare happens at one of `RARE_RATES`."""
    return Mixture([f"{rate:g} of all tokens" for rate in RARE_RATES], alpha)


def rare_event_factors(happened: npt.ArrayLike, null_rate: float) -> FloatArray:
    """Return the log factors [n, rates] against: given the past, each event has chance `null_rate`."""
    events = np.asarray(happened, dtype=bool)[:, None]
    rates = np.maximum(RARE_RATES, null_rate)
    return np.where(events, np.log(rates / null_rate), np.log1p(-rates) - math.log1p(-null_rate))


def smallest_share(steps: int, null_rate: float, alpha: float, power: float = 0.99) -> float | None:
    """Return the smallest share of events that `rare_event_mixture` would notice with some probability.

    Exact for independent events: the fewest that make the average reach 1 / alpha at the last step, and the
    rate at which at least as many happen with probability `power`. None if not even an event at every step
    would be noticed.

    >>> round(smallest_share(1000, 1e-4, 1e-3), 4)
    0.01
    """
    from scipy import stats  # takes half a second

    events = np.arange(steps + 1)[:, None]
    happened, missed = rare_event_factors([True, False], null_rate)
    evidence = np.logaddexp.reduce(events * happened + (steps - events) * missed, axis=1)
    enough = np.flatnonzero(evidence - math.log(len(RARE_RATES)) >= -math.log(alpha))
    if not len(enough):
        return None
    fewest = int(enough[0])
    return float(stats.beta.ppf(power, fewest, steps - fewest + 1))
