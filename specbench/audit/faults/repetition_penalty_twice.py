"""Count the repetition penalty twice in the verification.

A penalty of 1.2 acts as 1.44: the logits come penalised, and are penalised.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import CountedTwice, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters", "contract")


class RepetitionPenaltyTwice(CountedTwice):
    """Verify with the repetition penalty counted twice."""

    parameter = "repetition"


def alter(strategy: Strategy) -> Strategy:
    """Count the repetition penalty twice in the verification."""
    return plant(strategy, RepetitionPenaltyTwice)
