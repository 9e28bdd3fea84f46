"""What a run says, for people and machines: one table model, one renderer per format."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Literal

from specbench.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from specbench.bench.store import Run

Format = Literal["terminal", "markdown", "json"]
RENDERERS = {"terminal": "terminal", "markdown": "markdown", "json": "json_"}


def require_format(format: str) -> None:  # noqa: A002
    """Refuse a format that there is no renderer for."""
    if format not in RENDERERS:
        raise UsageError(
            f"no format '{format}'{did_you_mean(format, RENDERERS)}", hint=f"known: {', '.join(RENDERERS)}"
        )


def report(run: Run, format: Format = "terminal", width: int | None = None, *, color: bool = False) -> str:  # noqa: A002
    """Render a run.

    Args:
        run: What is stored of it; no model and no records are needed.
        format: `terminal`, `markdown` or `json`.
        width: Columns of the terminal, None for the one at hand; other formats have no width.
        color: Whether the terminal format may colour its text.
    """
    require_format(format)
    renderer = importlib.import_module(f"specbench.report.{RENDERERS[format]}")
    text: str = renderer.render(run, width=width, color=color)
    return text
