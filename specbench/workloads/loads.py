"""How requests are offered: a fixed number in flight, or random arrivals; and the labels of both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specbench.errors import WorkloadError, did_you_mean

_HINT = "write c=8 (in flight at once), poisson=0.7 (share of capacity) or rate=2/s"


@dataclass(frozen=True, slots=True)
class Load:
    """An offered load, named by its label on the command line, in records and in tables.

    closed: `concurrency` requests are in flight; a new one starts when one ends. Label `c=8`.
    poisson: requests arrive at random, whatever the engine does. The mean rate is either `rate` in
        requests per second (`rate=2/s`), or `utilisation`, a share of the closed-loop throughput that
        ordinary decoding was measured to reach on this machine (`poisson=0.7`). At 1 and above the
        queue grows for as long as the run lasts.
    """

    kind: Literal["closed", "poisson"]
    concurrency: int | None = None
    utilisation: float | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        given = {
            name
            for name, value in (
                ("concurrency", self.concurrency),
                ("utilisation", self.utilisation),
                ("rate", self.rate),
            )
            if value is not None
        }
        allowed = ({"concurrency"},) if self.kind == "closed" else ({"utilisation"}, {"rate"})
        if given not in allowed:
            raise WorkloadError(f"a {self.kind} load cannot be made from {sorted(given)}", hint=_HINT)
        if self.concurrency is not None and self.concurrency < 1:
            raise WorkloadError(f"concurrency must be at least 1, not {self.concurrency}", hint=_HINT)
        for name, value in (("utilisation", self.utilisation), ("rate", self.rate)):
            if value is not None and not (0 < value < math.inf):
                raise WorkloadError(f"{name} must be a positive number, not {value}", hint=_HINT)

    @property
    def label(self) -> str:
        """The one string that names this load everywhere."""
        if self.concurrency is not None:
            return f"c={self.concurrency}"
        if self.utilisation is not None:
            return f"poisson={_shortest(self.utilisation)}"
        return f"rate={_shortest(self.rate or 0.0)}/s"

    @classmethod
    def parse(cls, text: str) -> Load:
        """Read a label back.

        Raises:
            WorkloadError: The text is not a label, or its number is out of range.
        """
        key, _, value = (part.strip() for part in text.strip().partition("="))
        if key not in ("c", "poisson", "rate"):
            near = did_you_mean(key, ["poisson", "rate"])
            raise WorkloadError(f"no load '{text}'{near}", hint=_HINT)
        try:
            if key == "c":
                return cls("closed", concurrency=int(value))
            number = float(value.removesuffix("/s") if key == "rate" else value)
        except ValueError:
            expected = "a whole number" if key == "c" else "a number"
            raise WorkloadError(f"load '{text}': expected {expected} after '{key}='", hint=_HINT) from None
        return cls("poisson", utilisation=number) if key == "poisson" else cls("poisson", rate=number)


def poisson_arrivals(num: int, rate: float, seed: int | np.random.Generator) -> list[float]:
    """Draw the arrival times of a Poisson process, in seconds from its start.

    The gaps, the one before the first arrival included, are independent and exponential with mean
    1 / `rate`. The first `n` arrivals do not depend on `num`.

    Raises:
        WorkloadError: `num` is negative, or `rate` is not a positive number of requests per second.
    """
    if num < 0:
        raise WorkloadError(f"the number of arrivals must not be negative, not {num}")
    if not 0 < rate < math.inf:
        raise WorkloadError(f"the arrival rate must be a positive number, not {rate}", hint=_HINT)
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, size=num)
    return [float(time) for time in np.cumsum(gaps)]


def _shortest(number: float) -> str:
    """Print a number so that it reads back exactly, and whole numbers without a point."""
    return repr(float(number)).removesuffix(".0")
