"""Leave rejected tokens in the draft's own cache.

The draft reads a text that the target never wrote, and drifts away from it. It still offers what it drew
with the law it drew from, so the output stays right: only acceptance suffers. Reports: mlxcel 994, whose
drafter fell behind the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._drafters import WrappedDrafter, plant_in_own_cache
from specbench.decoding.verification import Proposal
from specbench.runtime.protocols import DraftContext, Drafter, Strategy

CLASS: FaultClass = "KV and position state"
SHOWS: tuple[Shows, ...] = ()


class DraftCacheNotRolledBack(WrappedDrafter):
    """Shows the draft a text in which its rejected tokens were never taken back.

    `views[row]` is that text, of which the target wrote all but the rejected tokens: `read[row]` tokens.
    """

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.views: dict[int, list[int]] = {}
        self.read: dict[int, int] = {}
        self.chains: list[list[int]] = []

    def prefill(self, first_row: int, prompts: Sequence[list[int]], features: dict[int, Tensor]) -> None:
        """Take in new prompts."""
        super().prefill(first_row, prompts, features)
        for row, prompt in enumerate(prompts, start=first_row):
            self.views[row], self.read[row] = list(prompt), len(prompt)

    def propose(self, context: DraftContext) -> Proposal:
        """Draft what would follow the longer text."""
        slots = []
        for row, tokens in enumerate(context.tokens):
            width = len(tokens) + context.slots[row]
            self.views[row] += tokens[self.read[row] :]
            self.read[row] = len(tokens)
            if len(self.views[row]) + context.limits[row] > width:  # no room left for both: begin again
                self.inner.release([row])
                self.inner.prefill(row, [tokens[:-1]], {})
                self.views[row] = list(tokens)
            slots.append(width - len(self.views[row]))
        views = [self.views[row] for row in range(len(context.tokens))]
        proposal = self.inner.propose(replace(context, tokens=views, slots=slots))
        offered = zip(proposal.tokens.tolist(), proposal.offered, strict=True)
        self.chains = [chain[:count] for chain, count in offered]
        return proposal

    def commit(self, accepted: Sequence[int], features: dict[int, Tensor]) -> None:
        """Keep every drafted token, accepted or not."""
        if not self.chains:
            self.inner.commit(accepted, features)
            return
        for row, (kept, chain) in enumerate(zip(accepted, self.chains, strict=True)):
            self.views[row] += chain
            self.read[row] += kept
        self.inner.commit([len(chain) for chain in self.chains], features)
        self.chains = []

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Copy a row."""
        super().fork(source, targets)
        for target in targets:
            self.views[target], self.read[target] = list(self.views[source]), self.read[source]

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        super().release(rows)
        for row in rows:
            del self.views[row], self.read[row]


def alter(strategy: Strategy) -> Strategy:
    """Keep what was rejected in the cache of a draft model."""
    return plant_in_own_cache(strategy, DraftCacheNotRolledBack)
