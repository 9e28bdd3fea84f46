"""Apply logit biases to the draft only.

The draft keeps off a token, and the target puts it in. Reports: SGLang 10617.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import OnDraftOnly, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters", "contract")


class LogitBiasOnDraftOnly(OnDraftOnly):
    """Verify without logit biases."""

    parameter = "bias"


def alter(strategy: Strategy) -> Strategy:
    """Take logit biases out of the verification."""
    return plant(strategy, LogitBiasOnDraftOnly)
