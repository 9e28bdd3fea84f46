"""The Markdown format: tables as GitHub shows them in a pull request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specbench.report.build import build
from specbench.report.table import Column, Report, Table

if TYPE_CHECKING:
    from specbench.bench.store import Run


def render(run: Run, *, width: int | None = None, color: bool = False) -> str:
    """Return the report as GitHub-flavoured Markdown: warnings, conclusions, then the tables behind them."""
    return render_report(build(run))


def render_report(report: Report) -> str:
    """Return a report as Markdown."""
    blocks = [f"### {inline(report.title)}"]
    if report.banners:
        blocks.append("> [!WARNING]\n" + "\n".join(f"> - {inline(banner)}" for banner in report.banners))
    if report.heading:
        blocks.append(inline(report.heading))
    blocks.append("\n".join(f"- {inline(text)}" for text in report.conclusions))
    blocks.extend(inline(line) for line in report.footnotes)
    for table in report.tables:
        blocks.append(f"#### {inline(table.title)}")
        blocks.append("\n".join(table_lines(table)))
        blocks.extend(inline(note) for note in table.notes)
    small = [*report.context, *report.legend]
    if small:
        lines = "\n".join(f"- {inline(line)}" for line in small)
        blocks.append(f"<details><summary>Setting and legend</summary>\n\n{lines}\n\n</details>")
    return "\n\n".join(blocks) + "\n"


def table_lines(table: Table) -> Iterator[str]:
    """Yield the lines of a table, without its title and notes."""
    yield _line([_header(column) for column in table.columns])
    yield _line([":--" if column.align == "left" else "--:" for column in table.columns])
    for row in table.rows:
        yield _line([inline(cell.text) for cell in row])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _header(column: Column) -> str:
    return inline(column.label + (f" ({column.unit})" if column.unit else ""))


def inline(text: str) -> str:
    """Escape what Markdown would read as something else."""
    for mark in ("\\", "|", "<", ">", "*", "_", "`", "#"):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
