"""Allow in each row of the window what the row before it allows as well.

Masks are written into a buffer that still holds those of the row before. Drafts within the grammar stay
within it; recovered and bonus tokens may not.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.runtime.loop import StepLoop, Window
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "grammar"
SHOWS: tuple[Shows, ...] = ("contract",)


class GrammarMaskOfPreviousRow(StepLoop):
    """Do not clear a buffer."""

    def _constrain(self, window: Window) -> None:
        """Widen what the grammars allow behind each drafted token."""
        super()._constrain(window)
        if window.allowed is not None and window.proposal.num:
            allowed = window.allowed.clone()
            allowed[:, 1:] |= window.allowed[:, :-1]
            window.allowed = allowed


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy mix the masks of neighbouring rows."""
    return plant(strategy, GrammarMaskOfPreviousRow)
