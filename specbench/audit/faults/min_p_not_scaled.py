"""Cut at min_p itself, not at min_p times the largest probability, in the verification.

Where the model is sure the two hardly differ; where it is not, too much is cut.
"""

from __future__ import annotations

import torch

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant, with_draft
from specbench.decoding.distribution import Distribution
from specbench.runtime.loop import StepLoop, Window
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters",)


class MinPNotScaled(StepLoop):
    """Forget to multiply."""

    def law(self, window: Window) -> Distribution:
        """Return laws without what is less likely than min_p; the most likely token stays."""
        right = super().law(window)
        if window.proposal.num == 0 or "min_p" not in self.sampling.uses or right.probs is None:
            return right
        floor = self.sampling.min_p.to(right.probs.dtype)[:, None, None]
        best = right.probs.amax(-1, keepdim=True)
        kept = torch.where((right.probs >= floor) | (right.probs == best), right.probs, 0.0)
        cut = kept / kept.sum(-1, keepdim=True)
        return Distribution.dense(torch.where(with_draft(window)[..., None], cut, right.probs))


def alter(strategy: Strategy) -> Strategy:
    """Cut the verification's laws at min_p."""
    return plant(strategy, MinPNotScaled)
