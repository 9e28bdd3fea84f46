"""The one table model: what a renderer is given, whatever it renders to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Align = Literal["left", "right"]
Tone = Literal["plain", "good", "bad", "doubtful"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `name` is the stored field its numbers come from.

    `header` is as narrow as can be, with line breaks; `label` is the name in full, where there is room.
    Columns of one `group` stay together where a table has to be split.
    """

    name: str
    header: str
    label: str
    unit: str = ""
    group: str = ""
    align: Align = "right"


@dataclass(frozen=True, slots=True)
class Cell:
    """What is shown, and the number behind it if it is one."""

    text: str
    value: float | None = None
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under columns.

    The first `num_keys` columns say what a row is about; they are repeated where the table is split.
    `breaks` holds the rows that start a new block.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    num_keys: int
    notes: tuple[str, ...] = ()
    breaks: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a human-readable format shows, in the order it shows it.

    `conclusions`, under their `heading`, are the answer; `footnotes` explain the marks in them.
    """

    title: str
    banners: tuple[str, ...]
    heading: str
    conclusions: tuple[str, ...]
    footnotes: tuple[str, ...]
    tables: tuple[Table, ...]
    legend: tuple[str, ...]
    context: tuple[str, ...]
