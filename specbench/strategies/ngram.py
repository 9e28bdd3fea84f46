"""N-gram drafting (prompt lookup): propose what followed the longest suffix when it occurred before.

Saxena 2023, "Prompt Lookup Decoding"; matching as in vLLM's n-gram proposer: the longest suffix of prompt
and output, between `min` and `max` tokens, that occurred earlier, at its earliest occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specbench.decoding.verification import RULES, Proposal, RuleName
from specbench.policies import length_policy
from specbench.registry import PolicySpec
from specbench.runtime.protocols import DraftContext, DraftMemory, Resources, Strategy
from specbench.runtime.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Options:
    """`k` tokens at most; suffixes of `min` to `max` tokens; the rule that verifies; how many to draft."""

    k: int = 4
    min: int = 2
    max: int = 4
    verify: RuleName = "rejection"
    policy: PolicySpec = "fixed"

    def __post_init__(self) -> None:
        """Refuse lengths that match nothing."""
        if self.k < 1:
            raise ValueError(f"k={self.k}; a draft has at least 1 token")
        if not 1 <= self.min <= self.max:
            raise ValueError(f"min={self.min}, max={self.max}; expected 1 <= min <= max")


class SuffixIndex:
    """Where each n-gram of a growing sequence first ended; constant work per token and per look-up."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest = shortest
        self.longest = longest
        self.indexed = 0
        self.first_end: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that end before the last token: those that have a continuation."""
        for end in range(self.indexed + 1, len(tokens)):
            for length in range(self.shortest, min(self.longest, end) + 1):
                self.first_end.setdefault(tuple(tokens[end - length : end]), end)
        self.indexed = max(self.indexed, len(tokens) - 1)

    def continuation(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that followed the longest suffix that occurred before."""
        for length in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            start = self.first_end.get(tuple(tokens[-length:]))
            if start is not None:
                return list(tokens[start : start + most])
        return []

    def copy(self) -> SuffixIndex:
        """Return an independent index of the same sequence."""
        twin = SuffixIndex(self.shortest, self.longest)
        twin.indexed, twin.first_end = self.indexed, dict(self.first_end)
        return twin


class NgramDrafter:
    """One suffix index per row; q is the point mass on each proposed token."""

    needs_features: ClassVar[tuple[int, ...]] = ()
    shares_target_cache: ClassVar[bool] = False
    runners: Sequence[ModelRunner] = ()

    def __init__(self, options: Options, device: object) -> None:
        self.options = options
        self.device = device
        self.indexes: dict[int, SuffixIndex] = {}

    def prefill(self, first_row: int, prompts: Sequence[list[int]], features: dict[int, Tensor]) -> None:
        """Index the prompts."""
        del features
        for offset, prompt in enumerate(prompts):
            index = SuffixIndex(self.options.min, self.options.max)
            index.extend(prompt)
            self.indexes[first_row + offset] = index

    def propose(self, context: DraftContext) -> Proposal:
        """Look up each row's longest suffix."""
        chains = []
        for row, (tokens, most) in enumerate(zip(context.tokens, context.limits, strict=True)):
            self.indexes[row].extend(tokens)
            chains.append(self.indexes[row].continuation(tokens, most) if most else [])
        return Proposal.certain(chains, self.device)  # type: ignore[arg-type]

    def commit(self, accepted: Sequence[int], features: dict[int, Tensor]) -> None:
        """Nothing to do: the index follows the committed tokens."""

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Copy a row's index."""
        for target in targets:
            self.indexes[target] = self.indexes[source].copy()

    def release(self, rows: Sequence[int]) -> None:
        """Drop indexes."""
        for row in rows:
            self.indexes.pop(row, None)

    def memory(self) -> DraftMemory:
        """No weights, no KV."""
        return DraftMemory()


def build(options: Options, name: str, resources: Resources) -> Strategy:
    """Build the strategy."""
    rule = RULES[options.verify]()
    drafter = NgramDrafter(options, resources.target.device)
    return Strategy(name, drafter, rule, length_policy(options.policy, options.k), lossless=rule.lossless)
