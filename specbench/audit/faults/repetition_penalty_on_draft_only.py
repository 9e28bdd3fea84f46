"""Apply the repetition penalty to the draft only.

The draft avoids what it said before, and the target says it again. Reports: mlx-node 11, where the
penalty reached the first token only.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import OnDraftOnly, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters", "contract")


class RepetitionPenaltyOnDraftOnly(OnDraftOnly):
    """Verify without the repetition penalty."""

    parameter = "repetition"


def alter(strategy: Strategy) -> Strategy:
    """Take the repetition penalty out of the verification."""
    return plant(strategy, RepetitionPenaltyOnDraftOnly)
