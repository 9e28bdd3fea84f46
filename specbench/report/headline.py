"""Which of the three speedups a workload is judged by, and how it is worded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench.metrics.summary import CellSummary, Estimate


@dataclass(frozen=True, slots=True)
class Headline:
    """One speedup: the field that holds it, its column, what it compares, and what its interval is."""

    field: str
    header: str
    object: str
    explanation: str

    def of(self, cell: CellSummary) -> Estimate | None:
        """Return this speedup of a cell."""
        estimate: Estimate | None = getattr(cell, self.field)
        return estimate


HEADLINES = {
    "decode": Headline(
        "decode_speedup",
        "decode\nspeedup",
        "ordinary decoding",
        "decode speedup: ordinary TPOT / this TPOT, geometric mean over prompts [95 % bootstrap interval].",
    ),
    "e2e": Headline(
        "e2e_speedup",
        "E2E\nspeedup",
        "ordinary decoding end to end",
        "E2E speedup: ordinary latency per output token / this one's, geometric mean over prompts "
        "[95 % bootstrap interval].",
    ),
    "throughput": Headline(
        "throughput_ratio",
        "throughput\nratio",
        "the throughput of ordinary decoding",
        "throughput ratio: output throughput / ordinary's at the same load, geometric mean over repeats "
        "[range of the repeats].",
    ),
}


def headline_of(workload: Mapping[str, Any]) -> Headline:
    """Return the speedup a workload asks for; decode speedup where it does not say."""
    name = str(workload.get("headline") or "decode").lower()
    return next((HEADLINES[key] for key in HEADLINES if name.startswith(key)), HEADLINES["decode"])
