"""Count logit biases twice in the verification.

Hardly a matter at -100, but at 2 it is 4.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import CountedTwice, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters",)


class LogitBiasTwice(CountedTwice):
    """Verify with logit biases counted twice."""

    parameter = "bias"


def alter(strategy: Strategy) -> Strategy:
    """Count logit biases twice in the verification."""
    return plant(strategy, LogitBiasTwice)
