"""Apply temperature to the bonus row only.

Drafted places are judged at temperature 1. Reports: vLLM 10198, where the target's laws lacked the
sampling parameters.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import OnBonusOnly, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters",)


class TemperatureOnBonusOnly(OnBonusOnly):
    """Leave temperature out of the rows that judge drafts."""

    parameter = "temperature"


def alter(strategy: Strategy) -> Strategy:
    """Take temperature out of the rows that judge drafts."""
    return plant(strategy, TemperatureOnBonusOnly)
