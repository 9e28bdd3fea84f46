"""Apply logit biases to the bonus row only.

A token with a bias of -100 then appears in accepted runs. Reports: SGLang 10617.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import OnBonusOnly, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters", "contract")


class LogitBiasOnBonusOnly(OnBonusOnly):
    """Leave logit biases out of the rows that judge drafts."""

    parameter = "bias"


def alter(strategy: Strategy) -> Strategy:
    """Take logit biases out of the rows that judge drafts."""
    return plant(strategy, LogitBiasOnBonusOnly)
