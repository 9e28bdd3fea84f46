"""Leave the last row of the window unmasked by the grammar.

The drafts are checked, the bonus token is not: one mask for each draft token, and one too few in all.
Reports: vLLM 14702, which adds the missing ones; TensorRT-LLM 7878.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.runtime.grammar import Matcher
from specbench.runtime.loop import StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "grammar"
SHOWS: tuple[Shows, ...] = ("contract",)


class GrammarRowUnmasked(StepLoop):
    """Count the masks by the drafts."""

    def grammar_masks(
        self, matcher: Matcher, nodes: Sequence[int], parents: Sequence[int]
    ) -> tuple[list[int], Tensor]:
        """Allow everything after the last allowed node."""
        kept, masks = super().grammar_masks(matcher, nodes, parents)
        if kept:
            masks[kept[-1] + 1] = -1
        return kept, masks


def alter(strategy: Strategy) -> Strategy:
    """Leave one row of a window unmasked."""
    return plant(strategy, GrammarRowUnmasked)
