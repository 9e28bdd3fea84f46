"""Every figure that comes from target forwards: what a step costs, and what it costs beside an ordinary one.

A step counts here if its phase is `decode`: a mixed step holds a prefill that would drown the difference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from specbench.economics import break_even
from specbench.records import Serving, StepRecord


def decode_steps(servings: Iterable[Serving]) -> list[StepRecord]:
    """Return the steps that only decoded."""
    return [step for serving in servings for step in serving.steps if step.phase == "decode"]


def mean_measured(steps: Iterable[StepRecord], part: Callable[[StepRecord], float | None]) -> float | None:
    """Return the mean of a part over the steps where it was measured."""
    values = [value for step in steps if (value := part(step)) is not None]
    return sum(values) / len(values) if values else None


def harness_overhead(steps: Iterable[StepRecord]) -> float | None:
    """Return 1 - model forward time / step wall time, over the steps where both are known."""
    known = [(step.forward_s, step.wall_s) for step in steps if step.forward_s is not None]
    wall = sum(wall_s for _, wall_s in known)
    return 1 - sum(forward_s for forward_s, _ in known) / wall if wall > 0 else None


def context_bucket(context: int) -> int:
    """Return the bucket of a context: b holds the lengths from 2^(b-1) to 2^b - 1."""
    return context.bit_length()


class OrdinaryStepCost:
    """The mean seconds of an ordinary decode step at a batch size and context bucket.

    Where ordinary decoding was never seen at that pair, the nearest bucket of the same batch stands in
    (the shorter context on a tie), and where the batch was never seen, the mean of all ordinary steps.
    """

    def __init__(self, steps: Iterable[StepRecord]) -> None:
        times: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        everything = []
        for step in steps:
            times[step.batch][context_bucket(step.context_max)].append(step.wall_s)
            everything.append(step.wall_s)
        self._means = {
            batch: {bucket: _mean(seconds) for bucket, seconds in buckets.items()}
            for batch, buckets in times.items()
        }
        self._overall = _mean(everything) if everything else None

    def seconds(self, batch: int, context: int) -> float | None:
        """Return the mean for one batch and context, or None if there was no ordinary step at all."""
        buckets = self._means.get(batch)
        if buckets is None:
            return self._overall
        wanted = context_bucket(context)
        return buckets[min(buckets, key=lambda bucket: (abs(bucket - wanted), bucket))]

    def matched_mean(self, steps: Sequence[StepRecord]) -> float | None:
        """Return what the given steps would have taken on average as ordinary ones."""
        return mean_measured(steps, lambda step: self.seconds(step.batch, step.context_max))


def round_cost_ratio(steps: Sequence[StepRecord], ordinary: OrdinaryStepCost) -> float | None:
    """Return mean step seconds / mean ordinary step seconds, matched by batch and context bucket.

    Each bucket of ordinary steps weighs as much as this strategy's steps in it.
    """
    step_s = mean_measured(steps, lambda step: step.wall_s)
    ordinary_s = ordinary.matched_mean(steps)
    return break_even.round_cost_ratio(step_s, ordinary_s) if step_s is not None and ordinary_s else None


def draft_cost_ratio(servings: Sequence[Serving], ordinary: OrdinaryStepCost) -> float | None:
    """Return c: draft seconds per drafted position / ordinary step seconds, over decode steps with a draft.

    The rows of a step draft together, so a step drafts as many positions as its deepest proposal.
    """
    seconds, positions, drafting = 0.0, 0, []
    for serving in servings:
        depths = _deepest(serving)
        for step in decode_steps([serving]):
            if depths[step.step] > 0 and step.draft_s is not None:
                seconds += step.draft_s
                positions += depths[step.step]
                drafting.append(step)
    ordinary_s = ordinary.matched_mean(drafting)
    return seconds / positions / ordinary_s if ordinary_s else None


def modelled_cost_ratio(servings: Sequence[Serving], ordinary: OrdinaryStepCost) -> float | None:
    """Return (ordinary step + drafting) / ordinary step in time, over all decode steps.

    The round cost ratio of a strategy whose verification costs what an ordinary step does. A step without a
    draft counts as well, with the time it took to find none. None where nothing drafts, or where a step
    drafted and its time is not known.
    """
    seconds, decode = 0.0, decode_steps(servings)
    for serving in servings:
        depths = _deepest(serving)
        for step in decode_steps([serving]):
            if step.draft_s is None and depths[step.step] > 0:
                return None
            seconds += step.draft_s or 0.0
    ordinary_s = ordinary.matched_mean(decode)
    if not ordinary_s or all(step.draft_s is None for step in decode):
        return None
    return 1 + seconds / len(decode) / ordinary_s


def k_switches(servings: Sequence[Serving]) -> float | None:
    """Return k switches per 100 decode steps: steps whose deepest proposal differs from the step before."""
    switches, total = 0, 0
    for serving in servings:
        depths = _deepest(serving)
        ordered = sorted(decode_steps([serving]), key=lambda step: step.step)
        switches += sum(depths[before.step] != depths[after.step] for before, after in pairwise(ordered))
        total += len(ordered)
    return 100 * switches / total if total else None


def graph_misses(steps: Sequence[StepRecord]) -> float | None:
    """Return decode steps that replayed no graph, per 100; None where none was ever captured or replayed."""
    replayed = sum(step.dispatch == "graph" for step in steps)
    if not any(step.dispatch in ("graph", "capture") for step in steps):
        return None
    return 100 * (len(steps) - replayed) / len(steps)


def dispatch_counts(servings: Iterable[Serving]) -> dict[str, int]:
    """Return how many steps, of any phase, were run in each way."""
    return dict(Counter(step.dispatch for serving in servings for step in serving.steps))


def _deepest(serving: Serving) -> Counter[int]:
    depths: Counter[int] = Counter()
    for row in serving.rounds:
        depths[row.step] = max(depths[row.step], row.draft_depth)
    return depths


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
