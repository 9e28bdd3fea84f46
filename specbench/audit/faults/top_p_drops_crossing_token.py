"""Leave the token that crosses the mass out of the nucleus, in the verification.

The sum is compared after the token was added instead of before. Each law loses its least likely token, and no
token appears that could not: only shares tell.
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


class TopPDropsCrossingToken(StepLoop):
    """Make the nucleus one token too small."""

    def law(self, window: Window) -> Distribution:
        """Return laws without the last token of each nucleus, if it has another."""
        right = super().law(window)
        if window.proposal.num == 0 or "top_p" not in self.sampling.uses or right.probs is None:
            return right
        some = right.probs > 0
        last = torch.where(some, right.probs, 2.0).argmin(-1, keepdim=True)
        alone = some.sum(-1, keepdim=True) == 1
        cut = torch.where(alone, right.probs, right.probs.scatter(-1, last, 0.0))
        cut = cut / cut.sum(-1, keepdim=True)
        return Distribution.dense(torch.where(with_draft(window)[..., None], cut, right.probs))


def alter(strategy: Strategy) -> Strategy:
    """Make the nuclei of the verification too small."""
    return plant(strategy, TopPDropsCrossingToken)
