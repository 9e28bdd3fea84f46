"""Put the tables of the published quick run into README.md, between its two markers.

    specbench run --models smollm2 --quick --run-id smollm2-quick --output results/published
    python tools/readme_table.py

The README shows the conclusions, some of the tables, and the columns that matter most; the whole report
is written beside the run folder. `--check` changes nothing and exits 1 if either is out of date.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from specbench.bench.store import RunStore
from specbench.report import report
from specbench.report.build import build
from specbench.report.markdown import render_report
from specbench.report.table import Table

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "results" / "published" / "smollm2-quick"
BEGIN, END = "<!-- table:begin", "<!-- table:end -->"
TABLES = ("predictable: load c=1", "high-concurrency: load c=8", "audit")
SHOWN = {
    "strategy", "temperature", "tokens_per_target_step", "draft_acceptance_rate", "draft_s", "verify_s",
    "break_even_tokens_per_step", "ttft", "tpot", "output_throughput", "decode_speedup", "e2e_speedup",
    "throughput_ratio", "verdict", "draws", "df", "p_value", "smallest_detectable_tv",
}  # fmt: skip


def narrowed(table: Table) -> Table:
    """Return a table with the columns in SHOWN."""
    kept = [index for index, column in enumerate(table.columns) if column.name in SHOWN]
    return replace(
        table,
        columns=tuple(table.columns[index] for index in kept),
        rows=tuple(tuple(row[index] for index in kept) for row in table.rows),
    )


def updated(readme: str, tables: str) -> str:
    """Return the README with what stands between the markers replaced."""
    head, begin, rest = readme.partition(BEGIN)
    marker, _, after = rest.partition("-->\n")
    _, end, tail = after.partition(END)
    if not (begin and end):
        sys.exit("README.md has lost its table markers")
    return f"{head}{begin}{marker}-->\n\n{tables.strip()}\n\n{end}{tail}"


def main() -> None:
    """Update or check the README, and the markdown beside the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    run = RunStore.open(RUN).document
    built = build(run)
    chosen = [table for table in built.tables if table.title.startswith(TABLES)]
    short = replace(built, tables=tuple(narrowed(table) for table in chosen), legend=())
    readme = ROOT / "README.md"
    wanted = {
        readme: updated(readme.read_text("utf-8"), render_report(short)),
        RUN.with_suffix(".md"): report(run, "markdown"),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
    if options.check:
        sys.exit(f"{stale[0].name} is out of date: run python tools/readme_table.py" if stale else 0)
    for path in stale:
        path.write_text(wanted[path], "utf-8")


if __name__ == "__main__":
    main()
