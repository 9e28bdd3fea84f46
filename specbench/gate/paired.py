"""The test behind the gate: has a ratio of counts changed, on the same prompts measured twice?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

POWER = 0.99
"""The probability with which a change of the smallest detectable size is found."""


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """Two pooled ratios of the same `prompts`, and what is known of their difference.

    A ratio whose denominator is 0 is None, and with it everything that needs it. `error` is the standard
    error of `after - before`, and needs two prompts. `identical`: every prompt has the same counts.
    """

    before: float | None
    after: float | None
    prompts: int
    identical: bool
    error: float | None
    p_value: float | None

    @property
    def change(self) -> float | None:
        """Return the relative change, None where there is nothing to relate it to."""
        if not self.before or self.after is None:
            return None
        return self.after / self.before - 1

    def smallest_detectable(self, level: float, tolerance: float) -> float | None:
        """Return the relative change found with probability .99 by the test at `level`.

        It takes the noise seen between these two sides as given. A change is found when it is significant
        and exceeds `tolerance`. None where the counts are identical (any difference would have shown) or
        nothing is tested.
        """
        from scipy import special

        if self.identical or self.error is None or not self.before:
            return None
        freedom = self.prompts - 1
        limit = -float(special.stdtrit(freedom, level / 2))
        noncentrality = float(special.nctdtrinc(freedom, 1 - POWER, limit))
        noise = self.error / abs(self.before)
        return max(noncentrality * noise, tolerance + float(special.ndtri(POWER)) * noise)


def compare_ratios(before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]) -> PairedRatio:
    """Test whether the pooled ratio sum(a) / sum(b) is the same before and after, paired by prompt.

    Null hypothesis: for every prompt, its two pairs (a, b) follow the same law, and prompts are
    independent given what the prompts are. Then the two sides of a prompt may be swapped. With R the
    ratio pooled over both sides, which a swap leaves alone, each prompt's difference
    d = (a - R b) after - (a - R b) before just changes its sign, so it is symmetric about 0; the sum of
    the d is the change of the pooled ratio times the harmonic mean of the two denominators. The test is
    Student's t on the d, two-sided.

    Prompts differ in how well they can be drafted; pairing removes that. Symmetry under the null is why
    the t-test may be trusted with few prompts; it is approximate below some ten of them, and says nothing
    with one. Invalid when a prompt's requests were counted as several units (repeats at temperature 0 are
    copies), or when prompts were left out for how they turned out. A large p-value does not show that
    nothing changed: see `PairedRatio.smallest_detectable`.

    Args:
        before: (a, b) per prompt. Prompts with b = 0 on both sides tell nothing and are left out.
        after: The same prompts in the same order.

    References:
        Cochran, Sampling Techniques (1977), 6.3, on ratios; Efron, JASA 64 (1969), on t under symmetry.

    >>> same = compare_ratios([(30, 10), (28, 10), (33, 10)], [(31, 10), (27, 10), (33, 10)])
    >>> round(same.p_value, 3), same.identical
    (1.0, False)
    """
    pairs = [(x, y) for x, y in zip(before, after, strict=True) if x[1] or y[1]]
    a_before, b_before = sum(x[0] for x, _ in pairs), sum(x[1] for x, _ in pairs)
    a_after, b_after = sum(y[0] for _, y in pairs), sum(y[1] for _, y in pairs)
    first = a_before / b_before if b_before else None
    second = a_after / b_after if b_after else None
    identical = all(x == y for x, y in pairs)
    num = len(pairs)
    if first is None or second is None or num < 2:
        return PairedRatio(first, second, num, identical, None, None)
    pooled = (a_before + a_after) / (b_before + b_after)
    differences = [(y[0] - pooled * y[1]) - (x[0] - pooled * x[1]) for x, y in pairs]
    mean = math.fsum(differences) / num
    spread = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (num - 1))
    harmonic = 2 * b_before * b_after / (b_before + b_after)
    error = math.sqrt(num) * spread / harmonic
    return PairedRatio(first, second, num, identical, error, _p_value(mean, spread, num))


def _p_value(mean: float, spread: float, num: int) -> float:
    from scipy import special

    scale = abs(mean) + spread
    if scale < 1e-9:  # rounding: nothing differs on the whole
        return 1.0
    if spread < 1e-9 * scale:
        return 0.0
    statistic = mean / (spread / math.sqrt(num))
    return float(2 * special.stdtr(num - 1, -abs(statistic)))
