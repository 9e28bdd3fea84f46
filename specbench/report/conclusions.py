"""The closing sentences: what was fastest, by how much, how sure, and whether the distribution held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from specbench.audit.verdicts import ChiSquaredVerdict
from specbench.metrics.summary import CellSummary, Estimate
from specbench.report.context import workload_config
from specbench.report.headline import Headline, headline_of
from specbench.report.wording import bounds, is_again, listing, probability, times_ordinary

if TYPE_CHECKING:
    from specbench.bench.store import Run

Outcome = Literal["faster", "slower", "noise", "unknown"]


def conclusions(run: Run) -> Iterator[str]:
    """Return one paragraph per workload: every load and temperature in turn, then the audit."""
    workloads = dict.fromkeys(cell.key.workload for cell in run.cells)
    for name in workloads:
        cells = [cell for cell in run.cells if cell.key.workload == name]
        headline = headline_of(workload_config(run, name))
        loads = dict.fromkeys(cell.key.load for cell in cells)
        clauses = []
        for load in loads:
            here = [cell for cell in cells if cell.key.load == load]
            for temperature in sorted({cell.key.temperature for cell in here}):
                same = [cell for cell in here if cell.key.temperature == temperature]
                where = f"T={temperature:g}" + (f", load {load}" if len(loads) > 1 else "")
                clauses.append(f"{where}: {what_was_fastest(same, headline)}.")
        strategies = dict.fromkeys(cell.key.strategy for cell in cells if not cell.is_baseline)
        rivals = [strategy for strategy in strategies if not is_again(strategy)]
        baseline = next((cell.key.strategy for cell in cells if cell.is_baseline), None)
        yield f"{name}, {' '.join(clauses)} {whether_it_held(run.audits, rivals, baseline)}{_trust(run)}"


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
    best, rest = ranked[0], ranked[1:]
    parts = [_first(best, rivals[best], again, headline.object)]
    told: dict[str, list[str]] = {
        words: []
        for words in ("about as fast", "also faster", "inside the noise", "without an interval", "lost")
    }
    for name in rest:
        told[_beside(rivals[name], rivals[best], again)].append(f"{name} ({rivals[name].value:.2f}x)")
    for words, members in told.items():
        if members:
            parts.append(f"{listing(members)} lost" if words == "lost" else f"{words}: {listing(members)}")
    return "; ".join(parts)


def _beside(estimate: Estimate, best: Estimate, again: Estimate | None) -> str:
    """Word how a strategy did that was not the best; overlapping intervals do not tell two apart."""
    outcome = _outcome(estimate, again)
    if outcome == "faster":
        assert estimate.high is not None  # else the outcome is unknown
        return "about as fast" if best.low is not None and estimate.high >= best.low else "also faster"
    return {"noise": "inside the noise", "unknown": "without an interval", "slower": "lost"}[outcome]


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
        named = listing([f"{a.strategy} (p = {probability(a.p_value)})" for a in failed])
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
    """Judge one speedup by its own interval, and by what ordinary decoding scores against itself."""
    if estimate.low is None or estimate.high is None:
        return "unknown"
    low, high = _noise(again)
    if estimate.low > 1:
        return "faster" if estimate.value > high else "noise"
    if estimate.high < 1:
        return "slower" if estimate.value < low else "noise"
    return "noise"


def _noise(again: Estimate | None) -> tuple[float, float]:
    """Return the speedups that the A/A row calls possible without any change; at least 1 itself."""
    if again is None:
        return 1.0, 1.0
    low = again.value if again.low is None else again.low
    high = again.value if again.high is None else again.high
    return min(low, 1.0), max(high, 1.0)


def _first(name: str, estimate: Estimate, again: Estimate | None, ordinary: str) -> str:
    """Word the best strategy: whether it won, and how far that is beyond the noise."""
    measured = times_ordinary(estimate)
    outcome = _outcome(estimate, again)
    if outcome == "unknown":
        return f"{name} came out first, {measured} {ordinary}, but too little was measured for an interval"
    if outcome == "slower":
        return f"nothing beat {ordinary}; the best, {name}, lost ({measured})"
    if outcome == "noise":
        cause = f"; ordinary against itself: {times_ordinary(again)}" if again else ""
        return f"no strategy stood out; the best, {name}, is inside the noise ({measured}{cause})"
    sentence = f"{name} was fastest: {estimate.value:.2f}x {ordinary} {bounds(estimate)}"
    if again is None:
        return f"{sentence}, no A/A row to judge the noise by"
    _, high = _noise(again)
    assert estimate.low is not None  # else the outcome is unknown
    clear = "clear of" if estimate.low > high else "though that interval overlaps"
    return f"{sentence}, {clear} the noise (ordinary against itself: {times_ordinary(again)})"


def _power(audits: Sequence[ChiSquaredVerdict]) -> str:
    """Say how hard the passed audits tried: the weakest of them speaks for all."""
    settings = sorted({audit.temperature for audit in audits})
    detectable = [a.smallest_detectable_tv for a in audits if a.smallest_detectable_tv is not None]
    text = f"chi-squared at T={listing([f'{t:g}' for t in settings])}"
    return text + (f", smallest detectable TV {max(detectable):.3f}" if detectable else "")


def _trust(run: Run) -> str:
    """Say once more, where the claim is made, that its times cannot be trusted."""
    reasons = []
    if run.busy and run.busy.get("busy"):
        reasons.append("the machine was busy")
    if run.config.get("engine") == "simulated":
        reasons.append("the engine was simulated")
    if run.config.get("inject"):
        reasons.append(f"fault '{run.config['inject']}' was injected")
    return f" ({listing(reasons).capitalize()}.)" if reasons else ""
