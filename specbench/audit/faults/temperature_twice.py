"""Count temperature twice in the verification.

At .7 the target is sampled at .49: once by the model's runner, once by the verifier.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import CountedTwice, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters",)


class TemperatureTwice(CountedTwice):
    """Verify with temperature counted twice."""

    parameter = "temperature"


def alter(strategy: Strategy) -> Strategy:
    """Count temperature twice in the verification."""
    return plant(strategy, TemperatureTwice)
