"""Pictures of an audit, drawn from its stored records alone: evidence over tokens, PIT, chi-squared cells.

Knows how they look, and that equal records give equal files. matplotlib is an optional package, imported
where something is drawn.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.audit.verdicts import AuditRecord, CellCount, PooledTable
from specbench.bench.store import replace_file
from specbench.errors import UsageError
from specbench.stats import count_band, standardised_residuals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: Mapping[str, Any] = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "figure.titlesize": 12,
    "font.size": 10,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "svg.fonttype": "path",  # letters as shapes, so that no viewer needs the font
    "svg.hashsalt": "specbench",  # else ids are random
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}
WIDTH = 8.0
"""Inches; a pull request shows some 100 pixels of each."""
INK, PAPER_GREY, BAND = "#111111", "#b9c4d0", "#eceff3"
REGIME_LINES = (("#1b5e8c", "--"), ("#b3541e", "-."), ("#5b8a3c", ":"), ("#8a6fb0", (0, (5, 1, 1, 1, 1, 1))))
"""Told apart by their dashes where colours are not."""
BAND_CONFIDENCE = 0.99
RESIDUAL_BOUND = 2.576
"""Normal quantile of .995: the two-sided bound of one residual at 99 %."""
LONGEST_NAME = 80
LONGEST_LABEL = 30


def require_matplotlib() -> None:
    """Find out now, not after the audit, whether plots can be drawn; raises UsageError if not."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError(
            "plots need matplotlib, which is not installed",
            hint="pip install 'specbench-llm[plots]', or in a clone: pip install '.[plots]'",
        ) from None


def write_plots(records: Sequence[AuditRecord], folder: Path) -> list[Path]:
    """Draw what there is of each strategy, a file for each kind of plot; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, record in enumerate(records):
        for kind, draw in PLOTS.items():
            content = _svg(draw, record, kind)
            if content is not None:
                path = folder / file_name(number, record.strategy, kind)
                replace_file(path, content)
                written.append(path)
    return written


def file_name(number: int, strategy: str, kind: str) -> str:
    """Return a name that every file system takes; the number tells strategies apart that look alike in it.

    >>> file_name(3, "draft:k=3,verify=block", "pit")
    '3-draft-k-3-verify-block-pit.svg'
    """
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", strategy).strip("-.")[:LONGEST_NAME]
    return f"{number}-{plain}-{kind}.svg"


def left_out(record: AuditRecord) -> Iterator[str]:
    """Say which plots of a strategy there are not, and why."""
    if record.traces is None:
        yield f"{record.strategy}: no e-value and PIT plots: stored before their numbers were kept"
    if record.chi_squared is None:
        yield f"{record.strategy}: no chi-squared plot: after an alarm continuations are not drawn"
    elif not record.chi_squared.tables:
        yield f"{record.strategy}: no chi-squared plot: its cells were not stored"


Draw = Callable[[AuditRecord], "Figure | None"]


def _svg(draw: Draw, record: AuditRecord, kind: str) -> bytes | None:
    """Return one plot as a file; None if the record holds nothing to draw it from."""
    from matplotlib import style

    with style.context(["default", dict(STYLE)]):
        figure = draw(record)
        if figure is None:
            return None
        output = io.BytesIO()
        about = {"Title": f"{_drawable(record.strategy)}: {kind}", "Creator": "specbench", "Date": None}
        figure.savefig(output, format="svg", metadata=about)
    return output.getvalue()


def _figure(record: AuditRecord, height: float, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    injected = f", with fault '{record.injected}'" if record.injected else ""
    heading = f"{record.strategy}: {record.verdict}{injected}"
    figure.suptitle(f"{_plain(_short(heading, 75))}\n{title}", x=0.01, ha="left")
    return figure


# Evidence


def evidence_figure(record: AuditRecord) -> Figure | None:
    """Draw the e-value over tokens: of the whole e-process, and of each regime by itself."""
    traces = record.traces
    if traces is None:
        return None
    from matplotlib.ticker import MaxNLocator

    figure = _figure(record, 4.2, "e-value over tokens: evidence against the target's distribution")
    axes = figure.subplots()
    tokens, scale = np.array(traces.tokens), math.log(10)
    axes.plot(tokens, np.array(traces.log_e) / scale, color=INK, linewidth=2.0, label="whole test", zorder=3)
    regimes = {name: values for name, values in traces.log_e_by_regime.items() if sum(traces.pit[name])}
    if len(traces.log_e_by_regime) > 1:  # else the one regime is the whole
        lines = itertools.cycle(REGIME_LINES)
        for (regime, values), (color, dashes) in zip(regimes.items(), lines, strict=False):
            logs, label = np.array(values) / scale, f"regime {regime}"
            axes.plot(tokens, logs, color=color, linestyle=dashes, linewidth=1.1, label=label)
    bar = record.bar / scale
    axes.axhline(bar, color=INK, linewidth=1.0, linestyle=(0, (6, 3)))
    label = f"alarm at 1/α = {math.exp(record.bar):,.0f}"
    right = axes.get_yaxis_transform()
    axes.text(0.995, bar, label, transform=right, ha="right", va="bottom", fontsize=9, zorder=4)
    if record.tokens_at_alarm is not None:
        axes.axvline(record.tokens_at_alarm, color=INK, linewidth=0.8, linestyle=":")
        said = f"alarm after {record.tokens_at_alarm:,} tokens"
        axes.plot([record.tokens_at_alarm], [bar], "o", color=INK, markersize=7, label=said, zorder=4)
    low, high = axes.get_ylim()
    axes.set_ylim(low, max(high, bar + 0.12 * (bar - low)))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(_power_of_ten)
    axes.set_xlim(0, max(1, traces.tokens[-1]))
    axes.set_xlabel("scored tokens, all regimes together")
    axes.set_ylabel("e-value")
    figure.legend(loc="outside lower left", ncols=3)
    return figure


def _power_of_ten(value: float, place: float) -> str:
    del place
    return f"$10^{{{value:g}}}$"


# PIT


def pit_figure(record: AuditRecord) -> Figure | None:
    """Draw the randomised PIT of the emitted tokens of each regime, relative to what is expected."""
    traces = record.traces
    counted = {name: np.array(c) for name, c in (traces.pit if traces else {}).items() if sum(c)}
    if not counted:
        return None
    title = "PIT of the emitted tokens, ids in order: a picture, not a verdict"
    figure = _figure(record, 3.1, title)
    panels = figure.subplots(1, len(counted), sharey=True, squeeze=False)[0]
    for axes, (regime, counts) in zip(panels, counted.items(), strict=True):
        total, bins = int(counts.sum()), len(counts)
        level = total / bins
        low, high = count_band(total, 1 / bins, BAND_CONFIDENCE)
        axes.axhspan(low / level, high / level, color=BAND, zorder=0)
        edges = np.linspace(0, 1, bins + 1)
        axes.stairs(counts / level, edges, fill=True, facecolor=PAPER_GREY, edgecolor=INK, linewidth=0.9)
        for bound in (low, high):
            axes.axhline(bound / level, color=INK, linewidth=0.8, linestyle=":")
        axes.axhline(1.0, color=INK, linewidth=1.2, linestyle="--")
        axes.set_title(f"{regime}: {total:,} tokens")
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.5, 1], ["0", ".5", "1"])
        axes.grid(visible=False)
    panels[0].set_ylim(0, max(2.0, panels[0].get_ylim()[1]))
    panels[0].set_ylabel("tokens / expected")
    said = "u = P(X < x) + v P(x);  dashed: expected;  dotted: 99% of a bin's counts, each bin by itself"
    figure.supxlabel(said, fontsize=9)
    return figure


# Continuations


def cells_figure(record: AuditRecord) -> Figure | None:
    """Draw the pooled table of each branch prompt: counts beside what was expected, and residuals."""
    checked = record.chi_squared
    if checked is None or not checked.tables:
        return None
    rows = [max(2, len(table.cells)) for table in checked.tables]
    found = "not tested" if checked.p_value is None else f"p = {checked.p_value:.2g}, df {checked.df}"
    title = f"chi-squared of whole continuations: {found}, {checked.draws:,} draws"
    figure = _figure(record, 1.9 + 0.21 * sum(rows) + 0.45 * len(rows), title)
    panels = figure.subplots(
        len(rows), 2, squeeze=False, height_ratios=rows, width_ratios=(3, 2), sharex="col", sharey="row"
    )
    for (counts, residuals), table in zip(panels, checked.tables, strict=True):
        _draw_counts(counts, table)
        _draw_residuals(residuals, table)
    panels[-1][0].set_xlabel("draws")
    panels[-1][0].set_xlim(left=0)
    panels[-1][1].set_xlabel("standardised residual")
    widest = max(3.5, *(1.1 * abs(bound) for bound in panels[-1][1].get_xlim()))
    panels[-1][1].set_xlim(-widest, widest)
    said = "'…' …: whatever else begins so;  dotted: 99% of one cell's residuals, each by itself"
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower left", ncols=2, title=said, title_fontsize=9, alignment="left"
    )
    return figure


def _draw_counts(axes: Axes, table: PooledTable) -> None:
    places = np.arange(len(table.cells))
    observed = [cell.observed for cell in table.cells]
    expected = [cell.expected for cell in table.cells]
    axes.barh(places, observed, height=0.62, color=PAPER_GREY, edgecolor=INK, linewidth=0.7, label="observed")
    axes.plot(
        expected, places, "|", color=INK, markersize=12, markeredgewidth=2.2, label="expected from the target"
    )
    axes.set_yticks(places, [_plain(cell_label(cell)) for cell in table.cells])
    axes.set_ylim(len(table.cells) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    words = table.text if table.text is not None else " ".join(map(str, table.prompt))
    axes.set_title(_plain(f"after {_tail(words, 40)}"), loc="left")


def _draw_residuals(axes: Axes, table: PooledTable) -> None:
    places = np.arange(len(table.cells))
    residuals = standardised_residuals(
        [cell.observed for cell in table.cells], [cell.expected for cell in table.cells]
    )
    for bound in (-RESIDUAL_BOUND, RESIDUAL_BOUND):
        axes.axvline(bound, color=INK, linewidth=0.8, linestyle=":")
    axes.axvline(0, color=INK, linewidth=0.9)
    axes.hlines(places, 0, residuals, color=INK, linewidth=1.2)
    outside = np.abs(residuals) > RESIDUAL_BOUND
    for chosen, face in ((outside, INK), (~outside, "white")):
        axes.plot(
            residuals[chosen], places[chosen], "o", color=INK, markerfacecolor=face, markersize=5, zorder=3
        )
    axes.tick_params(axis="y", labelleft=False)
    axes.grid(visible=False, axis="y")


def cell_label(cell: CellCount) -> str:
    """Name a cell: its continuation, what those in it begin with, or that it holds the rest."""
    if cell.tokens is None:
        return "all others"
    words = repr(cell.text) if cell.text is not None else " ".join(map(str, cell.tokens))
    return _short(words, LONGEST_LABEL) if cell.is_whole else f"{_short(words, LONGEST_LABEL - 2)} …"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _tail(text: str, most: int) -> str:
    """Return the end of a text in quotes: what comes next depends most on it."""
    return repr(text) if len(text) <= most else f"…{text[-most:]!r}"


def _plain(text: str) -> str:
    """Return a text to give to matplotlib, which would read what stands between dollars as a formula."""
    return _drawable(text).replace("$", r"\$")


def _drawable(text: str) -> str:
    """Return a text in letters that the font has; what it lacks stands there by its number."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties(family="DejaVu Sans"))).get_charmap()
    return "".join(c if ord(c) in known else c.encode("unicode_escape").decode() for c in text)


PLOTS: dict[str, Draw] = {"e-value": evidence_figure, "pit": pit_figure, "chi-squared": cells_figure}
"""How each kind is drawn, by the word that its files' names end in."""
