"""After a rejection go on counting positions from the end of the draft.

The cache is right, and so is the mask; only the position ids of one window are too large by the number of
tokens that were rejected. Models with relative positions hardly mind, which is why it goes unnoticed.
Reports: vLLM 54519 on positions and slots that were not advanced alike.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import RemembersLastRound, plant
from specbench.runtime.loop import Window
from specbench.runtime.protocols import Strategy
from specbench.runtime.runner import TreeWindow

CLASS: FaultClass = "KV and position state"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class PositionsNotRolledBack(RemembersLastRound):
    """Advance positions by what was drafted instead of by what was kept."""

    def layout(self, window: Window) -> TreeWindow | None:
        """Return the positions of the window, those after a rejection too large."""
        last = [self.last_of(row) for row in window.rows]
        beyond = [entry.draft_depth - entry.accepted if entry.rejected else 0 for entry in last]
        usual = super().layout(window)
        batch, num = window.proposal.tokens.shape
        if num == 0 or not any(beyond):
            return usual
        device = window.proposal.tokens.device
        if usual is None:
            chain = torch.ones(num + 1, num, dtype=torch.bool, device=device).tril(-1)
            usual = TreeWindow.to_verify(chain.expand(batch, -1, -1))
        return replace(usual, depths=usual.depths + torch.tensor(beyond, device=device)[:, None])


def alter(strategy: Strategy) -> Strategy:
    """Let the target's positions run on after a rejection."""
    return plant(strategy, PositionsNotRolledBack)
