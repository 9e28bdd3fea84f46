"""The terminal format: tables that fit the width, split rather than squeezed, readable without colour."""

from __future__ import annotations

import io
import itertools
import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.report.build import build
from specbench.report.table import Cell, Column, Table

if TYPE_CHECKING:
    from rich.console import Console

    from specbench.bench.store import Run

GAP = 2
"""Blanks between two columns."""

STYLES = {"plain": "", "good": "green", "bad": "bold red", "doubtful": "yellow"}


def render(run: Run, *, width: int | None = None, color: bool = False) -> str:
    """Return the report as text; where a table is wider than the terminal it becomes several, stacked."""
    report = build(run)
    width = width or shutil.get_terminal_size((100, 24)).columns
    output = io.StringIO()
    console = console_for(output, width, color)
    console.print(report.title, style="bold")
    print_lines(console, [f"! {banner}" for banner in report.banners], "bold yellow")
    console.print()
    if report.heading:
        console.print(report.heading)
    for conclusion in report.conclusions:
        lines = textwrap.wrap(conclusion, width, subsequent_indent="  ", break_on_hyphens=False)
        console.print("\n".join(lines), style="bold")
    for line in report.footnotes:
        console.print(line, style="dim")
    for table in report.tables:
        print_table(console, table, width)
    print_lines(console, report.legend, "dim")
    print_lines(console, report.context, "dim")
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def console_for(output: io.StringIO, width: int, color: bool) -> Console:
    """Return a console that writes what is given to it, without markup, emoji or highlights."""
    from rich.console import Console

    return Console(
        file=output,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )


def panels(table: Table, width: int) -> list[list[int]]:
    """Divide the columns into stacked tables that fit: whole groups where possible, else column by column.

    Every panel starts with the key columns; every other column is in exactly one panel.
    """
    widths = [_natural_width(table, place) for place in range(len(table.columns))]
    keys = list(range(table.num_keys))
    room = width - sum(widths[place] + GAP for place in keys)

    def needs(places: Sequence[int]) -> int:
        return sum(widths[place] + GAP for place in places) - GAP

    rest = range(table.num_keys, len(table.columns))
    groups = [list(places) for _, places in itertools.groupby(rest, key=lambda p: table.columns[p].group)]
    pieces = [
        piece for group in groups for piece in ([group] if needs(group) <= room else [[p] for p in group])
    ]
    filled: list[list[int]] = []
    for piece in pieces:
        if filled and needs(filled[-1] + piece) <= room:
            filled[-1] += piece
        else:
            filled.append(list(piece))
    return [keys + panel for panel in filled] or [keys]


def print_table(console: Console, table: Table, width: int) -> None:
    parts = panels(table, width)
    for number, places in enumerate(parts, start=1):
        console.print()
        console.print(table.title + (f" ({number} of {len(parts)})" if len(parts) > 1 else ""), style="bold")
        console.print(_rich_table(table, places))
    for note in table.notes:
        console.print(note, style="dim")


def _rich_table(table: Table, places: Sequence[int]) -> object:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    # The box draws one blank between columns; the padding makes it GAP.
    rich_table = RichTable(
        box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold"
    )
    for place in places:
        column = table.columns[place]
        rich_table.add_column(
            Text("\n".join(_header_lines(column))),
            justify=column.align,
            vertical="bottom",
            overflow="fold",
        )
    for number, row in enumerate(table.rows):
        if number in table.breaks:
            rich_table.add_section()
        rich_table.add_row(*(Text(row[place].text, style=STYLES[row[place].tone]) for place in places))
    return rich_table


def _natural_width(table: Table, place: int) -> int:
    from rich.cells import cell_len

    cells: list[Cell] = [row[place] for row in table.rows]
    texts = [*_header_lines(table.columns[place]), *(cell.text for cell in cells)]
    return max(cell_len(text) for text in texts)


def _header_lines(column: Column) -> list[str]:
    return column.header.split("\n") + ([column.unit] if column.unit else [])


def print_lines(console: Console, lines: Sequence[str], style: str) -> None:
    if lines:
        console.print()
    for line in lines:
        console.print(line, style=style)
