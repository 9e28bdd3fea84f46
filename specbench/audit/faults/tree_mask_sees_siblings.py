"""Let every node of a tree attend to the nodes of its own depth that come before it.

The mask is made from depths instead of parents: a node sees its siblings, which are other guesses at the same
place. The first branch is right. Trees only.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.runtime.loop import StepLoop, Window
from specbench.runtime.protocols import Strategy
from specbench.runtime.runner import TreeWindow

CLASS: FaultClass = "KV and position state"
SHOWS: tuple[Shows, ...] = ("good", "bad")


class TreeMaskSeesSiblings(StepLoop):
    """Show a node more than its ancestors."""

    def layout(self, window: Window) -> TreeWindow | None:
        """Return the layout of a tree with siblings visible."""
        usual = super().layout(window)
        if usual is None:
            return None
        size = usual.depths.shape[1]
        earlier = torch.ones(size, size, dtype=torch.bool, device=usual.depths.device).tril()
        level = usual.depths[:, :, None] == usual.depths[:, None, :]
        return replace(usual, visible=usual.visible | (earlier & level))


def alter(strategy: Strategy) -> Strategy:
    """Let a tree strategy attend across branches; one that drafts chains stays as it is."""
    return strategy if not strategy.max_nodes else plant(strategy, TreeMaskSeesSiblings)
