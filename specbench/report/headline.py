"""Which of the three speedups a workload is judged by, and how it is worded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specbench.metrics.summary import CellSummary, Estimate


@dataclass(frozen=True, slots=True)
class Headline:
    """One speedup: the field that holds it, its column, what it is in a sentence, and what its interval is.

    `what` tells it from the decode speedup in a sentence; `unit` is what the interval is made of.
    """

    field: str
    header: str
    what: str
    unit: Literal["prompt", "repeat"]
    explanation: str

    def of(self, cell: CellSummary) -> Estimate | None:
        """Return this speedup of a cell."""
        estimate: Estimate | None = getattr(cell, self.field)
        return estimate


HEADLINES = {
    "decode": Headline(
        "decode_speedup",
        "decode\nspeedup",
        "",
        "prompt",
        "decode speedup: ordinary TPOT / this TPOT, geometric mean over prompts [95 % bootstrap interval].",
    ),
    "e2e": Headline(
        "e2e_speedup",
        "E2E\nspeedup",
        "end to end",
        "prompt",
        "E2E speedup: ordinary latency per output token / this one's, geometric mean over prompts "
        "[95 % bootstrap interval].",
    ),
    "throughput": Headline(
        "throughput_ratio",
        "throughput\nratio",
        "throughput",
        "repeat",
        "throughput ratio: output throughput / ordinary's at the same load, geometric mean over repeats "
        "[range of the repeats].",
    ),
}


def headline_of(workload: Mapping[str, Any]) -> Headline:
    """Return the speedup a workload asks for; decode speedup where it does not say."""
    name = str(workload.get("headline") or "decode").lower()
    return next((HEADLINES[key] for key in HEADLINES if name.startswith(key)), HEADLINES["decode"])
