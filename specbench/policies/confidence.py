"""Draft up to `k` tokens, but stop after one that the draft itself found unlikely.

The stop that transformers calls `assistant_confidence_threshold`, with its default. The unlikely token is
kept: dropping it after a look at it would bias the output (see `draft_chain`). Drafts that are certain
by construction, n-grams, have probability 1 and never stop. At temperature 0 the draft's softmax counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbench.policies.fixed import Fixed
from specbench.runtime.protocols import LengthPolicy


@dataclass(frozen=True, slots=True)
class Options:
    """A row drafts no more after a token whose probability was below `threshold`."""

    threshold: float = 0.4

    def __post_init__(self) -> None:
        """Refuse what is no probability, and 0, which never stops."""
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold}; expected above 0 and at most 1")


class Confidence(Fixed):
    """Allow `k` tokens to every row; the drafter stops below `threshold`."""

    def __init__(self, k: int, threshold: float) -> None:
        super().__init__(k)
        self.stop_below = threshold


def build(options: Options, k: int) -> LengthPolicy:
    """Build the policy."""
    return Confidence(k, options.threshold)
