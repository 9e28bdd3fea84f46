"""The JSON format: the stored run in one document, with the words of the report beside its numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from specbench.report.build import build

if TYPE_CHECKING:
    from specbench.bench.store import Run


def render(run: Run, *, width: int | None = None, color: bool = False) -> str:
    """Return one JSON document; a figure's key is the name of its column in the tables."""
    words = build(run)
    document = {
        **asdict(run),
        "banners": list(words.banners),
        "conclusions": list(words.conclusions),
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
