"""The answer, in a line a condition: what was fastest, how much, how sure; and whether the law held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from specbench.audit.verdicts import ChiSquaredVerdict
from specbench.metrics.summary import CellSummary, Estimate
from specbench.report.context import workload_config
from specbench.report.headline import Headline, headline_of
from specbench.report.wording import (
    fixed,
    is_again,
    listing,
    mark,
    marks_explained,
    milliseconds,
    monte_carlo,
    times_ordinary,
)

if TYPE_CHECKING:
    from specbench.bench.store import Run

Outcome = Literal["faster", "slower", "noise", "unknown"]


def conclusions(run: Run) -> Iterator[str]:
    """Return one line per workload, load and temperature, then one about the audit; none without cells."""
    for (name, load, temperature), cells in _conditions(run).items():
        headline = headline_of(workload_config(run, name))
        several = len({cell.key.load for cell in run.cells if cell.key.workload == name}) > 1
        where = [f"{name} {load}" if several else name, f"T={temperature:g}", headline.what]
        yield f"{', '.join(filter(None, where))}: {what_was_fastest(cells, headline)}."
    yield from what_grammars_did(run)
    if run.cells:
        others = dict.fromkeys(cell.key.strategy for cell in run.cells if not cell.is_baseline)
        baseline = next((cell.key.strategy for cell in run.cells if cell.is_baseline), None)
        yield whether_it_held(run.audits, [name for name in others if not is_again(name)], baseline)


def what_grammars_did(run: Run) -> Iterator[str]:
    """Compare acceptance and verification of a workload with those of the same prompts without grammars."""
    for (name, load, temperature), free in _conditions(run).items():
        twin = workload_config(run, name).get("twin_of")
        bound = {
            cell.key.strategy: cell
            for cell in run.cells
            if (cell.key.workload, cell.key.load, cell.key.temperature) == (twin, load, temperature)
        }
        parts = [
            f"{cell.key.strategy} ({', '.join(_grammar_effect(bound[cell.key.strategy], cell))})"
            for cell in free
            if cell.key.strategy in bound and not is_again(cell.key.strategy)
        ]
        if parts:
            yield f"{twin} {load}, T={temperature:g}, with grammars against without: {'; '.join(parts)}."


def _grammar_effect(bound: CellSummary, free: CellSummary) -> Iterator[str]:
    """Word acceptance where something was drafted, and the mean time to verify a step, masks included."""
    if bound.draft_acceptance_rate is not None and free.draft_acceptance_rate is not None:
        rates = f"{fixed(bound.draft_acceptance_rate)} against {fixed(free.draft_acceptance_rate)}"
        yield f"draft acceptance rate {rates}"
    if bound.verify_s is not None and free.verify_s is not None:
        yield f"verify {milliseconds(bound.verify_s)} against {milliseconds(free.verify_s)} ms"


def footnotes(run: Run) -> tuple[str, ...]:
    """Return what the marks in the conclusions mean."""
    lines: dict[str, None] = {}
    for (name, _, _), cells in _conditions(run).items():
        lines |= dict.fromkeys(marks_of(cells, headline_of(workload_config(run, name))))
    return tuple(sorted(lines))


def marks_of(cells: Sequence[CellSummary], headline: Headline) -> list[str]:
    """Say what the marks at the speedups of these cells mean; ordinary decoding's own is 1 by definition."""
    return marks_explained([headline.of(cell) for cell in cells if not cell.is_baseline], headline.unit)


def _conditions(run: Run) -> dict[tuple[str, str, float], list[CellSummary]]:
    """Group the cells by what they have in common: workload and load as they came, temperatures rising."""
    workloads, loads = (
        list(dict.fromkeys(getattr(cell.key, name) for cell in run.cells)) for name in ("workload", "load")
    )
    found: dict[tuple[str, str, float], list[CellSummary]] = {}
    for cell in run.cells:
        found.setdefault((cell.key.workload, cell.key.load, cell.key.temperature), []).append(cell)
    order = sorted(found, key=lambda key: (workloads.index(key[0]), loads.index(key[1]), key[2]))
    return {key: found[key] for key in order}


def what_was_fastest(cells: Sequence[CellSummary], headline: Headline) -> str:
    """Compare the strategies of one workload, load and temperature with ordinary decoding and its noise."""
    rivals = {
        cell.key.strategy: estimate
        for cell in cells
        if not cell.is_baseline and not is_again(cell.key.strategy) and (estimate := headline.of(cell))
    }
    if not rivals:
        others = [c for c in cells if not c.is_baseline and not is_again(c.key.strategy)]
        return "no speedup was measured" if others else "only ordinary decoding was measured"
    again = next((headline.of(cell) for cell in cells if is_again(cell.key.strategy)), None)
    ranked = sorted(rivals, key=lambda name: -rivals[name].value)
    outcomes = {name: _outcome(rivals[name], again) for name in ranked}
    winner = next((name for name in ranked if outcomes[name] == "faster"), None)
    if winner is not None:
        parts = [_first(winner, rivals[winner], again)]
    elif "noise" in outcomes.values():
        parts = ["no winner"]
    else:
        parts = ["nothing beat ordinary decoding"] if "unknown" not in outcomes.values() else []
    told: dict[str, list[str]] = {
        words: [] for words in ("about as fast", "also faster", "inside the noise", "no verdict", "lost")
    }
    for name in ranked:
        if name != winner:
            words = _beside(rivals[name], outcomes[name], rivals[winner] if winner else None)
            full = winner is None and name == ranked[0]
            told[words].append(f"{name} ({times_ordinary(rivals[name]) if full else _short(rivals[name])})")
    parts += [f"{words}: {listing(members)}" for words, members in told.items() if members]
    decided = any(_is_up_to_the_noise(rivals[name], outcomes[name], again) for name in ranked)
    if decided and again is not None:
        parts.append(f"ordinary against itself: {times_ordinary(again)}")
    return "; ".join(parts)


def _short(estimate: Estimate) -> str:
    return f"{estimate.value:.2f}x{mark(estimate)}"


def _first(name: str, estimate: Estimate, again: Estimate | None) -> str:
    """Word a winner, and how it stands to the noise unless it is clear of it."""
    sentence = f"{name} was fastest, {times_ordinary(estimate)}"
    if again is None:
        return f"{sentence}, with no A/A row to judge the noise by"
    return f"{sentence}, though that overlaps the noise" if _overlaps(estimate, again) else sentence


def _beside(estimate: Estimate, outcome: Outcome, winner: Estimate | None) -> str:
    """Word how a strategy did that did not win; overlapping intervals do not tell two apart."""
    if outcome == "faster":
        assert estimate.high is not None  # else the outcome is unknown
        assert winner is not None  # the fastest of those that are faster
        return "about as fast" if winner.low is not None and estimate.high >= winner.low else "also faster"
    return {"noise": "inside the noise", "unknown": "no verdict", "slower": "lost"}[outcome]


def _is_up_to_the_noise(estimate: Estimate, outcome: Outcome, again: Estimate | None) -> bool:
    """Whether the A/A row and not the strategy's own interval says how it did, or how surely."""
    if estimate.low is None or estimate.high is None:
        return True
    if outcome == "faster":
        return _overlaps(estimate, again)
    return outcome == "noise" and not estimate.low <= 1 <= estimate.high


def _overlaps(estimate: Estimate, again: Estimate | None) -> bool:
    """Whether the interval of a faster strategy reaches down into the noise."""
    return estimate.low is not None and estimate.low <= _noise(again)[1]


def whether_it_held(
    audits: Sequence[ChiSquaredVerdict], strategies: Sequence[str], baseline: str | None = None
) -> str:
    """Say what the audit found about these strategies, and about the baseline where it should not have."""
    relevant = [audit for audit in audits if audit.strategy in strategies]
    if not strategies:
        return "Output distribution: nothing to compare."
    if not relevant:
        return "Output distribution: not checked."
    parts = []
    failed = [a for a in audits if a.verdict == "FAIL" and a.strategy in (*strategies, baseline)]
    if failed:
        named = listing([f"{a.strategy} ({_p(a)})" for a in failed])
        parts.append(f"DID NOT HOLD for {named}")
    passed = [audit for audit in relevant if audit.verdict == "PASS"]
    if passed:
        only = len({audit.strategy for audit in passed}) < len(strategies)
        names = list(dict.fromkeys(audit.strategy for audit in passed))
        parts.append("held" + (f" for {listing(names)}" if only else "") + f" ({_power(passed)})")
    for verdict, words in (("LOSSY", "changed by design for"), ("INCONCLUSIVE", "could not be judged for")):
        names = list(dict.fromkeys(audit.strategy for audit in relevant if audit.verdict == verdict))
        if names:
            parts.append(f"{words} {listing(names)}")
    unchecked = [name for name in strategies if name not in {audit.strategy for audit in relevant}]
    if unchecked:
        parts.append(f"not checked for {listing(unchecked)}")
    return f"Output distribution: {'; '.join(parts)}."


def _outcome(estimate: Estimate, again: Estimate | None) -> Outcome:
    """Judge one speedup by its own interval, and by what ordinary decoding scores against itself.

    A strategy won if its interval lies above 1 and its value beyond the noise, and lost only if its whole
    interval lies below both.
    """
    if estimate.low is None or estimate.high is None:
        return "unknown"
    low, high = _noise(again)
    if estimate.low > 1 and estimate.value > high:
        return "faster"
    return "slower" if estimate.high < low else "noise"


def _noise(again: Estimate | None) -> tuple[float, float]:
    """Return the speedups that the A/A row calls possible without any change; at least 1 itself."""
    if again is None:
        return 1.0, 1.0
    low = again.value if again.low is None else again.low
    high = again.value if again.high is None else again.high
    return min(low, 1.0), max(high, 1.0)


def _p(audit: ChiSquaredVerdict) -> str:
    text = monte_carlo(audit.p_value, audit.alpha)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def _power(audits: Sequence[ChiSquaredVerdict]) -> str:
    """Say how hard the passed audits tried: the weakest of them speaks for all."""
    settings = sorted({audit.temperature for audit in audits})
    detectable = [a.smallest_detectable_tv for a in audits if a.smallest_detectable_tv is not None]
    text = f"chi-squared at T={listing([f'{t:g}' for t in settings])}"
    return text + (f", smallest detectable TV {max(detectable):.3f}" if detectable else "")
