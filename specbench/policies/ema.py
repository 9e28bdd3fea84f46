"""Follow the accepted length: an average with memory, and a ladder of lengths for each range of batch sizes.

The scheme, the ladders and the parameters are those SGLang publishes for adaptive speculative decoding
(`--speculative-adaptive`), where a margin is called hysteresis. SGLang lets every request of a batch draft;
here rows that offered nothing (an n-gram that never occurred) say nothing about acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.runtime.protocols import BatchView, LengthPolicy, StepView


@dataclass(frozen=True, slots=True)
class Options:
    """How fast to learn, when to switch, and between which lengths.

    `alpha` is the weight of the newest step in the average. Lengths stay as they are for `warmup` steps and
    are reconsidered every `interval` steps from then on. `up` and `down` are the margins before a longer
    and a shorter length, in accepted tokens; on a ladder that includes 0 `down` is none. `tiers` holds a
    ladder from each batch size on, `from:length-length/from:length`; lengths above the strategy's `k`
    become `k`.
    """

    alpha: float = 0.2
    warmup: int = 10
    interval: int = 5
    up: float = 0.0
    down: float = 0.25
    tiers: str = "1:1-3-5-7/8:0-1-3/32:0-1/64:0"

    def __post_init__(self) -> None:
        """Refuse values with which lengths would never change, or mean nothing."""
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha}; expected above 0 and at most 1")
        if self.warmup < 0 or self.interval < 1:
            raise ValueError(
                f"warmup={self.warmup}, interval={self.interval}; expected at least 0 and at least 1"
            )
        for name in ("up", "down"):
            if (
                not 0 <= getattr(self, name) < 0.5
            ):  # a larger margin asks for more than all, or less than none
                raise ValueError(f"{name}={getattr(self, name)}; expected at least 0 and below 0.5")
        ladders(self.tiers)


def ladders(text: str) -> dict[int, list[int]]:
    """Read `1:1-3/8:0-1` as the lengths from each batch size on; raises ValueError if it cannot be read."""
    found: dict[int, list[int]] = {}
    for part in text.split("/"):
        start, _, lengths = part.partition(":")
        numbers = [start, *lengths.split("-")]
        if not all(number.isdecimal() for number in numbers) or int(start) in found:
            raise ValueError(
                f"cannot read tiers={text}; expected batch:length-length/batch:length, as 1:1-3/8:0-1"
            )
        found[int(start)] = sorted({int(number) for number in numbers[1:]})
    if 1 not in found:
        raise ValueError(f"tiers={text} says nothing of batch size 1; let its first entry begin with 1:")
    return found


class Tier:
    """The length for one range of batch sizes, and the average accepted length behind it.

    A step of length n can accept n tokens, so an average near n asks for more and one near the next shorter
    length for less. `average` starts at one less than the length: neither.
    """

    def __init__(self, lengths: Sequence[int], start: int, options: Options) -> None:
        self.lengths = lengths
        self.options = options
        self.down = 0.0 if 0 in lengths else options.down
        self.place = lengths.index(start) if start in lengths else len(lengths) // 2
        self.average: float | None = self.length - 1.0 if self.length else None
        self.steps = 0

    @property
    def length(self) -> int:
        """Return the length chosen now."""
        return self.lengths[self.place]

    def observe(self, accepted: Sequence[int]) -> None:
        """Learn how many tokens the rows that drafted got accepted, then perhaps switch."""
        if self.average is not None and accepted:
            self.average += self.options.alpha * (sum(accepted) / len(accepted) - self.average)
        self.steps += 1
        late = self.steps - self.options.warmup
        if late > 0 and late % self.options.interval == 0:
            self._switch()

    def _switch(self) -> None:
        if self.length == 0:
            # Nothing is learnt without a draft: try the shortest until the next time.
            self.place = min(1, len(self.lengths) - 1)
            if self.average is None and self.length:
                self.average = self.length - 1.0
            return
        assert self.average is not None
        before = self.place
        while self.place > 0 and self.average <= self._floor():
            self.place -= 1
        if self.place < before:
            return
        while self.place < len(self.lengths) - 1 and self.average > self.length - 0.5 + self.options.up:
            self.place += 1

    def _floor(self) -> float:
        """Return the average at which the next shorter length is enough; half a token is none."""
        return max(self.lengths[self.place - 1] - 0.5, 0.5) - self.down


class Ema:
    """One length for all rows, from the past acceptances of batches of that size."""

    stop_below = 0.0

    def __init__(self, k: int, options: Options) -> None:
        self.k = k
        self.options = options
        self.reset()
        self.max_length = max(tier.lengths[-1] for tier in self.tiers.values())
        self.lively_batch = self._lively_batch()

    def reset(self) -> None:
        """Begin again, at `k` on ladders that have it, else in their middle."""
        self.tiers = {
            batch: Tier(sorted({min(length, self.k) for length in lengths}), self.k, self.options)
            for batch, lengths in ladders(self.options.tiers).items()
        }

    def _lively_batch(self) -> int | None:
        """Return the largest batch of the first tier whose ladder reaches the longest draft."""
        starts = sorted(self.tiers)
        place = next(i for i, start in enumerate(starts) if self.tiers[start].lengths[-1] == self.max_length)
        if place + 1 < len(starts):
            return starts[place + 1] - 1
        return starts[place] if place else None  # the last tier has no largest batch

    def tier(self, batch: int) -> Tier:
        """Return the tier of a batch size."""
        return self.tiers[max(start for start in self.tiers if start <= batch)]

    def choose(self, view: BatchView) -> list[int]:
        """Return the length of the batch's tier for each row."""
        batch = len(view.contexts)
        return [self.tier(batch).length] * batch

    def observe(self, step: StepView) -> None:
        """Learn from the rows that drafted."""
        drafted = zip(step.drafted, step.accepted, strict=True)
        self.tier(len(step.drafted)).observe([accepted for offered, accepted in drafted if offered])


def build(options: Options, k: int) -> LengthPolicy:
    """Build the policy."""
    return Ema(k, options)
