"""Look for an EOS in the accepted run only.

The token behind it, recovered or bonus, is appended after the check: a text goes on if its EOS came there.
The mirror image of an EOS missed in mid-run, and found by none of the tests made for that one.
"""

from __future__ import annotations

from dataclasses import replace

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.commit import Committed
from specbench.runtime.loop import Decision, Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "stop and length"
SHOWS: tuple[Shows, ...] = ("contract", "identities")


class EosMissedAsBonus(StepLoop):
    """Append the extra token unseen."""

    def emit(self, row: Row, decision: Decision) -> Committed:
        """Go on where an EOS follows an accepted run."""
        result = super().emit(row, decision)
        if result.ended_by == "eos" and 1 < len(result.tokens) == len(decision.tokens) + 1:
            return replace(result, ended_by="budget" if len(result.tokens) == row.remaining else "none")
        return result


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy pass over an EOS behind an accepted run."""
    return plant(strategy, EosMissedAsBonus)
