"""Pearson's chi-squared test of a strategy's continuations against the target's exact law of them.

Knows what a continuation is and how its cells are formed; takes plain tuples and counts, no model. The law
comes from `reference.Oracle`, the continuations from the decoder under audit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specbench import stats

Continuation = tuple[int, ...]

MASS_TOLERANCE = 1e-9
"""How far the probabilities of a law may be from 1 together before it is refused."""


@dataclass(frozen=True)
class ExpectedTable:
    """The exact law of what follows one branch prompt: joint probabilities of whole continuations.

    A continuation is `horizon` tokens, or fewer when it ends in EOS. The keys of `truncated` are
    prefixes whose continuations were not told apart: such a key holds the probability of everything that
    begins with it. No key is the beginning of another, so everything the target can produce belongs to
    exactly one key. Probabilities are renormalised; a continuation of probability 0 is dropped.
    """

    continuations: Mapping[Continuation, float]
    truncated: frozenset[Continuation] = frozenset()

    def __post_init__(self) -> None:
        """Check that this is a law over distinct outcomes, and renormalise it."""
        if any(not probability >= 0 for probability in self.continuations.values()):
            raise ValueError("a continuation has a negative or undefined probability")
        mass = math.fsum(self.continuations.values())
        if not abs(mass - 1) <= MASS_TOLERANCE:
            raise ValueError(f"the probabilities of the continuations sum to {mass!r}; expected 1")
        law = {key: probability / mass for key, probability in self.continuations.items() if probability > 0}
        beginnings = {key[:length] for key in law for length in range(len(key))}
        if ambiguous := beginnings.intersection(law):
            raise ValueError(f"the continuation {min(ambiguous)} is also the beginning of another")
        object.__setattr__(self, "continuations", law)
        object.__setattr__(self, "truncated", self.truncated.intersection(law))

    def key_of(self, observed: Continuation) -> Continuation | None:
        """Return the key that an observed continuation belongs to, or None if the target cannot produce it.

        Below a truncated prefix every longer continuation is accepted: its support is checked up to the
        prefix only.
        """
        if observed in self.continuations and observed not in self.truncated:
            return observed
        prefixes = (observed[:length] for length in range(len(observed)))
        return next((prefix for prefix in prefixes if prefix in self.truncated), None)


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a pooled table.

    `continuation` is the one it holds, the prefix that all of its own share, or None for the tail.
    """

    continuation: Continuation | None
    expected: float
    observed: int


@dataclass(frozen=True, slots=True)
class ChiSquaredResult:
    """What the test found, over all branch prompts together.

    `draws` and `prompts` count everything observed; `tested_draws` those of prompts whose table has more
    than one cell, to which `statistic`, `df` and the TV figures refer. Those are None where nothing
    could be tested. `tv_observed` is the mean over tested prompts, weighted by draws, of the distance
    between the observed and the expected pooled table; noise alone makes it positive. `tv_upper` is a
    99 % upper confidence bound for the true distance. `smallest_detectable_tv` is the distance these
    draws find with probability .99. `out_of_support` counts continuations the target cannot produce.
    """

    statistic: float | None
    df: int
    p_value: float | None
    alpha: float
    draws: int
    tested_draws: int
    prompts: int
    out_of_support: int
    impossible: tuple[tuple[int, Continuation], ...]
    tv_observed: float | None
    tv_upper: float | None
    smallest_detectable_tv: float | None
    cells: tuple[tuple[Cell, ...], ...]

    @property
    def is_rejected(self) -> bool | None:
        """Whether the null is rejected; None when nothing could be tested, which is not a pass."""
        if self.out_of_support:
            return True
        return None if self.p_value is None else self.p_value <= self.alpha


def judge(
    tables: Sequence[tuple[ExpectedTable, Sequence[Continuation]]],
    *,
    alpha: float,
    generator: np.random.Generator,
    resamples: int | None = None,
    minimum_expected: float = 10.0,
) -> ChiSquaredResult:
    """Test whether continuations were drawn from the target's exact law, over several branch prompts.

    Null hypothesis: all draws are independent, and those of prompt i follow the i-th law. Rare
    continuations are pooled by their expected count; X2 and its degrees of freedom are summed over
    prompts; the p-value is by Monte Carlo (`stats.monte_carlo_p_value`). A continuation that the target
    cannot produce rejects the null whatever the p-value; it is counted in the tail of its table (in the
    last cell where there is no tail), so that the table still holds every draw.

    Invalid when draws share random numbers, when some were dropped for how they turned out or when they
    finished (an unfinished one is no continuation, and would count here as impossible), when the number of
    draws depended on the outcome, or when the law was computed in another precision than the decoder's:
    float32 only.

    Not rejecting does not show that the decoder is lossless: it rules out (with probability .99) only
    deviations of the pooled table of `smallest_detectable_tv` or more, on these prompts, within the
    horizon. Differences between continuations that share a cell are invisible.

    Args:
        tables: Per branch prompt its law and all its observed continuations, each cut at the horizon
            that the law was computed for.
        alpha: The level; one decision for all prompts together.
        generator: The source of the simulated tables.
        resamples: Of the Monte Carlo p-value; 10 / `alpha` or more (the default is as few as that).
        minimum_expected: Least expected count of a cell.

    References:
        Pearson, Philosophical Magazine 50 (1900); Cochran, Biometrics 10 (1954), on pooling.

    >>> coin = ExpectedTable({(0,): 0.5, (1,): 0.5})
    >>> draws = [(0,)] * 70 + [(1,)] * 30
    >>> result = judge([(coin, draws)], alpha=0.01, generator=np.random.default_rng(0))
    >>> (result.statistic, result.df, result.is_rejected)
    (16.0, 1, True)
    """
    pooled: list[tuple[Cell, ...]] = []
    impossible: list[tuple[int, Continuation]] = []
    for prompt, (law, continuations) in enumerate(tables):
        counts, strangers = _count(law, continuations)
        pooled.append(_pool(law, counts, len(continuations), sum(strangers.values()), minimum_expected))
        impossible.extend((prompt, continuation) for continuation in strangers.elements())

    tested = [cells for cells in pooled if len(cells) > 1]
    df = stats.degrees_of_freedom([len(cells) for cells in tested])
    tested_draws = sum(cell.observed for cells in tested for cell in cells)
    statistic = p_value = tv_observed = tv_upper = None
    if tested:
        observed = [[cell.observed for cell in cells] for cells in tested]
        expected = [[cell.expected for cell in cells] for cells in tested]
        statistic = sum(map(stats.chi_squared_statistic, observed, expected))
        p_value = stats.monte_carlo_p_value(
            observed, expected, generator=generator, resamples=resamples, alpha=alpha
        )
        differences = [abs(cell.observed - cell.expected) for cells in tested for cell in cells]
        tv_observed = math.fsum(differences) / (2 * tested_draws)
        tv_upper = stats.tv_upper_bound(statistic, df, tested_draws)
    return ChiSquaredResult(
        statistic=statistic,
        df=df,
        p_value=p_value,
        alpha=alpha,
        draws=sum(len(continuations) for _, continuations in tables),
        tested_draws=tested_draws,
        prompts=sum(len(continuations) > 0 for _, continuations in tables),
        out_of_support=len(impossible),
        impossible=tuple(impossible),
        tv_observed=tv_observed,
        tv_upper=tv_upper,
        smallest_detectable_tv=stats.smallest_detectable_tv(tested_draws, df, alpha),
        cells=tuple(pooled),
    )


def _count(
    law: ExpectedTable, continuations: Iterable[Continuation]
) -> tuple[Counter[Continuation], Counter[Continuation]]:
    """Count the draws of each key of the law, and the continuations that have none."""
    counts: Counter[Continuation] = Counter()
    strangers: Counter[Continuation] = Counter()
    for continuation, times in Counter(continuations).items():
        key = law.key_of(continuation)
        if key is None:
            strangers[continuation] += times
        else:
            counts[key] += times
    return counts, strangers


@dataclass(frozen=True, slots=True)
class Pooling:
    """Which cell each continuation of a law belongs to, and what each cell is called.

    `names` are whole continuations for cells of one, the prefix that its members share for a larger one,
    and None for the tail of what is left.
    """

    labels: Mapping[Continuation, int]
    names: tuple[Continuation | None, ...]


def pool_by_prefix(law: ExpectedTable, draws: int, minimum: float) -> Pooling:
    """Join rare continuations with their neighbours in the prefix tree until each cell expects enough.

    A continuation that expects `minimum` counts is a cell. What is left under a prefix becomes a cell there
    as soon as it expects enough, else it is left to the next shorter prefix, so that a long horizon keeps
    what can be told apart early. What is left at the top is the tail; one that expects too little joins the
    smallest cell. Decided by expected counts alone: pooling by what was observed would break the level.
    """
    children: dict[Continuation, list[Continuation]] = {}
    for key in sorted(law.continuations):
        for length in range(len(key), 0, -1):
            siblings = children.setdefault(key[: length - 1], [])
            if key[:length] in siblings:
                break
            siblings.append(key[:length])
    cells: list[tuple[Continuation | None, list[Continuation], float]] = []

    def settle(node: Continuation) -> tuple[list[Continuation], float]:
        """Form the cells under a node; return what is left over, and what it expects."""
        if node not in children:
            left, expected = [node], draws * law.continuations[node]
        else:
            parts = [settle(child) for child in children[node]]
            left = [key for keys, _ in parts for key in keys]
            expected = math.fsum(part for _, part in parts)
        if not left or expected < minimum:
            return left, expected
        cells.append((left[0] if len(left) == 1 else node or None, left, expected))
        return [], 0.0

    left, expected = settle(())
    cells.sort(key=lambda cell: -cell[2])
    if left and cells:
        _, members, held = cells[-1]
        cells[-1] = (None, members + left, held + expected)
    elif left:
        cells.append((None, left, expected))
    labels = {key: label for label, (_, members, _) in enumerate(cells) for key in members}
    return Pooling(labels, tuple(name for name, _, _ in cells))


def _pool(
    law: ExpectedTable, counts: Counter[Continuation], draws: int, strangers: int, minimum: float
) -> tuple[Cell, ...]:
    """Form the cells of one prompt by expected count; none without draws."""
    if draws == 0:
        return ()
    pooling = pool_by_prefix(law, draws, minimum)
    num = len(pooling.names)
    labels = [pooling.labels[key] for key in law.continuations]
    means = np.bincount(labels, weights=[draws * p for p in law.continuations.values()], minlength=num)
    sums = np.bincount(labels, weights=[counts[key] for key in law.continuations], minlength=num).astype(int)
    sums[-1] += strangers
    return tuple(Cell(name, float(means[i]), int(sums[i])) for i, name in enumerate(pooling.names))
