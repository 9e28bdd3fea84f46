"""Always the same draft length."""

from __future__ import annotations

from dataclasses import dataclass

from specbench.runtime.protocols import BatchView, StepView


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the policy."""

    k: int = 4

    def __post_init__(self) -> None:
        """Refuse a length that drafts nothing."""
        if self.k < 1:
            raise ValueError(f"k={self.k}; a draft has at least 1 token")


class Fixed:
    """Choose `k` for every row, always."""

    stop_below = 0.0

    def __init__(self, k: int) -> None:
        self.max_length = Options(k).k

    def choose(self, view: BatchView) -> list[int]:
        """Return k for each row."""
        return [self.max_length] * len(view.contexts)

    def observe(self, step: StepView) -> None:
        """Learn nothing."""
