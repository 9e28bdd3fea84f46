"""Count presence and frequency penalties twice in the verification.

Tokens that were said once are counted twice. Reports: vLLM 18902 on penalties under speculation.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import CountedTwice, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters", "contract")


class PresencePenaltyTwice(CountedTwice):
    """Verify with presence and frequency penalties counted twice."""

    parameter = "presence"


def alter(strategy: Strategy) -> Strategy:
    """Count presence and frequency penalties twice in the verification."""
    return plant(strategy, PresencePenaltyTwice)
