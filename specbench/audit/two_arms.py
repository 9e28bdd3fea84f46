"""Chi-squared where the exact law is not known: whole continuations with speculation against those without.

Knows how many are drawn, how continuations become cells that neither arm alone has formed, and what must be
exceeded before a difference is called a fault: what rounding itself does to continuations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specbench import stats
from specbench.audit import two_sample
from specbench.audit.chi_squared import Continuation, ExpectedTable, pool_by_prefix
from specbench.audit.verdicts import ComponentResult

ASSUMED_DF = 20
"""Degrees of freedom that the number of draws is planned for; how many there will be is not known before."""
MINIMUM_SHARE = 0.05
"""The least share of a prompt's draws, both arms together, that a cell of its own has."""

END = -1
"""Stands behind every continuation, so that none is the beginning of another."""

Drawn = Sequence[Continuation]


def draws_per_prompt(tv: float, alpha: float, prompts: int) -> int:
    """Return how many continuations of each prompt an arm draws to find a TV distance with probability .99.

    Two samples need twice what one needs where the law is known.
    """
    return math.ceil(2 * stats.draws_needed(tv, ASSUMED_DF, alpha) / prompts)


def cells(draws: Drawn) -> Callable[[Continuation], int]:
    """Return which cell a continuation belongs to, cells being formed by the counts of some draws.

    Rare continuations join those that share their prefix, as in `chi_squared`. A continuation that these
    draws do not hold belongs to the cell of its longest prefix that has one, or to the tail.
    """
    counts = Counter((*draw, END) for draw in draws)
    total = counts.total()
    law = ExpectedTable({key: times / total for key, times in counts.items()})
    pooling = pool_by_prefix(law, total, max(two_sample.MINIMUM_COMBINED, MINIMUM_SHARE * total))
    names = {name: label for label, name in enumerate(pooling.names) if name is not None}
    tail = len(pooling.names) - 1

    def cell(continuation: Continuation) -> int:
        found = pooling.labels.get((*continuation, END))
        if found is not None:
            return found
        prefixes = (continuation[:length] for length in range(len(continuation), 0, -1))
        return next((names[prefix] for prefix in prefixes if prefix in names), tail)

    return cell


def lower_bound(arms: Sequence[tuple[Drawn, Drawn]], alpha: float) -> float:
    """Return a lower confidence bound for the TV distance of both arms, the mean over prompts.

    The set of cells that arm one favours is chosen on every other draw, and how much more it favours it is
    read off the others, less what chance could add (Hoeffding 1963, theorem 2): the bound exceeds the true
    distance with probability at most `alpha`, for any number of draws. Can be negative.

    Invalid when draws were left out for how they turned out, or share random numbers.

    >>> lower_bound([([(1,)] * 2000, [(2,)] * 2000)], alpha=0.001) > 0.9
    True
    """
    total = sum(len(on) + len(off) for on, off in arms)
    difference = variance = 0.0
    for on, off in arms:
        halves = [(draws[0::2], draws[1::2]) for draws in (on, off)]
        if not all(part for half in halves for part in half):
            continue
        (chosen_on, other_on), (chosen_off, other_off) = halves
        cell = cells([*chosen_on, *chosen_off])
        rates_on, rates_off = (Counter(map(cell, part)) for part in (chosen_on, chosen_off))
        favoured = {
            label
            for label in rates_on
            if rates_on[label] / len(chosen_on) > rates_off[label] / len(chosen_off)
        }
        weight = (len(on) + len(off)) / total
        shares = [np.mean([cell(c) in favoured for c in part]) for part in (other_on, other_off)]
        difference += weight * float(shares[0] - shares[1])
        variance += weight**2 * (1 / len(other_on) + 1 / len(other_off))
    return difference - math.sqrt(variance * math.log(1 / alpha) / 2)


@dataclass(frozen=True, slots=True)
class TwoArms:
    """What was found. `lower` is the lower bound at the test's level, `floor` what rounding explains."""

    result: two_sample.TwoSampleResult
    lower: float
    floor: float

    @property
    def alarm(self) -> bool:
        """Whether more is different than rounding explains."""
        return self.lower > self.floor

    def component(self, tokens: int) -> ComponentResult:
        """Return this as a component: an alarm needs the lower bound above the floor, whatever p is."""
        found = self.result.component(tokens)
        if self.result.p_value is None:
            return found
        words = (
            f"on against off, {found.words}; at least TV {max(0.0, self.lower):.3f}, "
            f"{self.floor:.3f} being explained by rounding"
        )
        return ComponentResult(
            found.name, self.alarm, self.result.p_value, "p", self.result.alpha, tokens, words
        )


def judge(arms: Sequence[tuple[Drawn, Drawn]], *, floor: float, alpha: float, seed: int) -> TwoArms:
    """Compare the continuations of both arms, prompt by prompt.

    Null hypothesis: the joint laws of the continuations of both arms are no further apart than `floor`, in
    TV, the mean over prompts. The p-value beside it is of the narrower one that they are equal
    (`two_sample.judge`), which rounding alone breaks; it is shown, and decides nothing.

    Args:
        arms: Draws with and without speculation of each prompt, each with a seed of its own.
        floor: The TV distance that rounding explains.
        alpha: The level of the test.
        seed: Of the label swaps.
    """
    labelled = []
    for on, off in arms:
        cell = cells([*on, *off])
        labelled.append(two_sample.Arms([cell(c) for c in on], [cell(c) for c in off]))
    result = two_sample.judge(labelled, alpha=alpha, generator=np.random.default_rng(seed))
    return TwoArms(result, lower_bound(arms, alpha), floor)
