"""How a number, an interval and a strategy's name are written, the same in every table and sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from specbench.metrics.summary import CellSummary, Distribution, Estimate

DASH = "–"
"""What was not measured. Absent is not zero."""

FEW = 5
"""Prompts or repeats below which an interval is marked as too narrow (see `stats.paired_speedup`)."""

NO_INTERVAL, FEW_UNITS = "†", "‡"
"""What marks a figure without an interval, and one whose interval rests on fewer than FEW units."""

_BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def significant(value: float | None, digits: int = 3) -> str:
    """Write a number with `digits` significant digits and at most three decimals, but never as a false 0."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    if abs(value) < 0.001:
        return f"{value:.1e}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(0, decimals), 3)}f}"


def fixed(value: float | None, decimals: int = 2) -> str:
    """Write a ratio or a share with fixed decimals."""
    return DASH if value is None else f"{value:.{decimals}f}"


def milliseconds(seconds: float | None) -> str:
    """Write seconds as milliseconds."""
    return significant(None if seconds is None else 1000 * seconds)


def distribution(times: Distribution | None) -> str:
    """Write the median and the 95th percentile of times, in milliseconds."""
    return DASH if times is None else f"{milliseconds(times.p50)}/{milliseconds(times.p95)}"


def interval(estimate: Estimate | None) -> str:
    """Write `1.23 [1.18, 1.29]`, `1.23 [1.18, 1.29]‡` or `1.23†` (see `mark`)."""
    return DASH if estimate is None else f"{estimate.value:.2f}{_bounds(estimate)}{mark(estimate)}"


def times_ordinary(estimate: Estimate) -> str:
    """Write `1.23x [1.18, 1.29]`, with its mark if it has one."""
    return f"{estimate.value:.2f}x{_bounds(estimate)}{mark(estimate)}"


def _bounds(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f" [{estimate.low:.2f}, {estimate.high:.2f}]"


def mark(estimate: Estimate) -> str:
    """Return the sign of an estimate that rests on too little, or nothing."""
    if estimate.low is None or estimate.high is None:
        return NO_INTERVAL
    return FEW_UNITS if estimate.num < FEW else ""


def marks_explained(estimates: Iterable[Estimate | None], unit: str) -> list[str]:
    """Say what the marks of these estimates mean; `unit` is what their intervals are made of."""
    marks = {mark(estimate) for estimate in estimates if estimate is not None}
    more = {"prompt": "measure more prompts", "repeat": "add --repeats 5"}[unit]
    words = {
        NO_INTERVAL: f"one {unit} only, so no interval and no verdict; {more}.",
        FEW_UNITS: f"fewer than {FEW} {unit}s behind this interval, which is too narrow; {more}.",
    }
    return [f"{sign} {text}" for sign, text in words.items() if sign in marks]


def probability(value: float | None) -> str:
    """Write a p-value; small ones with an exponent, so that they never read as zero."""
    if value is None:
        return DASH
    return f"{value:.3f}" if value >= 0.001 else f"{value:.0e}" if value > 0 else "0"


def monte_carlo(value: float | None, alpha: float) -> str:
    """Write a Monte Carlo p-value read at level `alpha`; the least it can be, as a bound: `< 4e-05`."""
    from specbench.stats import smallest_p_value  # here, because it loads numpy

    if value is None or not math.isclose(value, smallest_p_value(alpha), rel_tol=1e-9):
        return probability(value)
    step = 10.0 ** min(-3, math.floor(math.log10(value)))
    return f"< {probability(math.ceil(value / step - 1e-9) * step)}"


def sizes(parts: Sequence[int | None]) -> str:
    """Write several sizes in one unit: `0 + 0 + 1.2 MiB`."""
    known = [part for part in parts if part is not None]
    if not known:
        return DASH
    unit, scale = next(((u, s) for u, s in _BYTE_UNITS if max(known) >= s), ("", 1))
    texts = (DASH if part is None else significant(part / scale, 2) for part in parts)
    return " + ".join(texts) + (f" {unit}" if unit else "")


def shares(counts: Mapping[str, int]) -> str:
    """Write what a set of counts consists of: `graph 97 %, eager 3 %`, or the one name there is."""
    total = sum(counts.values())
    if not total:
        return DASH
    if len(counts) == 1:
        return next(iter(counts))
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * count / total:.0f} %" for name, count in ordered if count)


def is_again(strategy: str) -> bool:
    """Return whether this is the A/A row: a strategy measured a second time against itself."""
    return "#" in strategy


def strategy_label(cell: CellSummary) -> str:
    """Name the row of a cell."""
    name, _, turn = cell.key.strategy.partition("#")
    if cell.is_baseline:
        return f"{name} (baseline)"
    if turn:
        return f"{name} again (A/A)" if turn == "2" else f"{name} again (A/A, {turn})"
    return name


def listing(words: Sequence[str]) -> str:
    """Write `a`, `a and b` or `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def counted(number: int, noun: str) -> str:
    """Write `1 prompt`, `2 prompts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
