"""Apply temperature to the draft only.

The target is sampled at temperature 1, whatever was asked for. Reports: LiteRT-LM 3017, which verified
with parameters that were not the target's.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import OnDraftOnly, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters",)


class TemperatureOnDraftOnly(OnDraftOnly):
    """Verify without temperature."""

    parameter = "temperature"


def alter(strategy: Strategy) -> Strategy:
    """Take temperature out of the verification."""
    return plant(strategy, TemperatureOnDraftOnly)
