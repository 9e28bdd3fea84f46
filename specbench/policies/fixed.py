"""Always the same draft length: the strategy's `k`."""

from __future__ import annotations

from dataclasses import dataclass

from specbench.runtime.protocols import BatchView, LengthPolicy, StepView


@dataclass(frozen=True, slots=True)
class Options:
    """The length is the strategy's `k`; there is nothing else to choose."""


class Fixed:
    """Choose `k` for every row, always."""

    stop_below = 0.0
    lively_batch: int | None = None

    def __init__(self, k: int) -> None:
        self.max_length = k

    def reset(self) -> None:
        """Nothing was learnt."""

    def choose(self, view: BatchView) -> list[int]:
        """Return k for each row."""
        return [self.max_length] * len(view.contexts)

    def observe(self, step: StepView) -> None:
        """Learn nothing."""


def build(options: Options, k: int) -> LengthPolicy:
    """Build the policy."""
    del options
    return Fixed(k)
