"""What a stored run says: golden files, the sentences, and that no width loses anything.

`UPDATE_GOLDEN=1 pytest tests/test_report.py` rewrites the golden files; read the difference then.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from specbench import stats
from specbench.audit.verdicts import ChiSquaredVerdict
from specbench.bench.store import Run, RunStore
from specbench.errors import UsageError
from specbench.metrics.definitions import DEFINITIONS
from specbench.metrics.summary import CellSummary, Distribution, Estimate
from specbench.records import plain
from specbench.report import Format, report, wording
from specbench.report.build import build
from specbench.report.conclusions import what_was_fastest, whether_it_held
from specbench.report.headline import HEADLINES, headline_of
from specbench.report.terminal import panels

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def run() -> Run:
    """Read the hand-made run: two workloads, five strategies, one audit that could not decide."""
    return RunStore.open(GOLDEN / "run").document


def but(run: Run, **changes: Any) -> Run:
    return dataclasses.replace(run, **changes)


def cells_of(run: Run, workload: str, temperature: float) -> list[CellSummary]:
    return [c for c in run.cells if (c.key.workload, c.key.temperature) == (workload, temperature)]


def with_speedups(run: Run, **speedups: tuple[float, float | None, float | None]) -> list[CellSummary]:
    """Take the cells of one workload and give each named strategy a decode speedup; drop the others."""
    names = {"again": "ordinary#2", "ngram": "ngram:k=4", "draft": "draft:k=4", "exit": "early-exit:k=3"}
    wanted = {names[name]: Estimate(*values, 12) for name, values in speedups.items()}
    return [
        dataclasses.replace(cell, decode_speedup=wanted.get(cell.key.strategy))
        for cell in cells_of(run, "predictable", 0.0)
        if cell.is_baseline or cell.key.strategy in wanted
    ]


def fastest(run: Run, **speedups: tuple[float, float | None, float | None]) -> str:
    return what_was_fastest(with_speedups(run, **speedups), HEADLINES["decode"])


# ---- Golden files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "format_", "width"),
    [
        ("terminal-100.txt", "terminal", 100),
        ("terminal-200.txt", "terminal", 200),
        ("report.md", "markdown", None),
    ],
)
def test_golden(run: Run, name: str, format_: Any, width: int | None) -> None:
    """The report of the hand-made run is exactly the committed one."""
    text = report(run, format_, width)
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


# ---- Terminal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 120, 160, 200, 300])
def test_no_width_is_exceeded_and_none_loses_a_cell(run: Run, width: int) -> None:
    """At any width every line fits, and every figure, header and note of the tables is there."""
    text = report(run, "terminal", width)
    assert max(len(line) for line in text.splitlines()) <= width
    squeezed = re.sub(r"[\s─]", "", text)
    folded = re.sub(r"\s", "", text) if width >= 60 else None
    for table in build(run).tables:
        for note in table.notes:
            assert re.sub(r"\s", "", note) in squeezed
        if folded is None:
            continue
        for row in table.rows:
            for cell in row:
                assert re.sub(r"\s", "", cell.text) in folded


@pytest.mark.parametrize("width", [30, 50, 80, 100, 150, 200, 400])
def test_split_tables_hold_every_column_once(run: Run, width: int) -> None:
    """Stacked tables repeat the key columns and hold every other column exactly once, in order."""
    for table in build(run).tables:
        keys = list(range(table.num_keys))
        parts = panels(table, width)
        assert all(part[: table.num_keys] == keys for part in parts)
        assert [place for part in parts for place in part[table.num_keys :]] == list(
            range(table.num_keys, len(table.columns))
        )


def test_groups_stay_together_where_they_fit(run: Run) -> None:
    """At 100 columns a table is split between groups, never within one."""
    for table in build(run).tables:
        for part in panels(table, 100):
            for group in {table.columns[place].group for place in part} - {""}:
                members = [p for p, column in enumerate(table.columns) if column.group == group]
                assert set(members) <= set(part)


def test_colour_is_only_colour(run: Run) -> None:
    """With colour the text is the same once the escapes are taken out; without it there are none."""
    plain, colored = report(run, "terminal", 120), report(run, "terminal", 120, color=True)
    assert "\x1b" not in plain
    assert "\x1b" in colored
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert [line.rstrip() for line in stripped.splitlines()] == plain.splitlines()


def test_strategy_names_are_not_read_as_markup(run: Run) -> None:
    """Brackets in a name or a note are printed, not interpreted."""
    first = run.cells[2]
    odd = dataclasses.replace(first, key=dataclasses.replace(first.key, strategy="x:[bold]=1"))
    text = report(but(run, cells=[odd], notes=["see [1]"]), "terminal", 200)
    assert "x:[bold]=1" in text
    assert "see [1]" in text


# ---- Markdown and JSON ------------------------------------------------------------------------------


def test_markdown_tables_are_rectangular(run: Run) -> None:
    """Every row of a Markdown table has as many cells as its header, whatever the names contain."""
    first = run.cells[2]
    odd = dataclasses.replace(first, key=dataclasses.replace(first.key, strategy="a|b:<c>=1"))
    text = report(but(run, cells=[run.cells[0], odd]), "markdown")
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) <= 1
    assert r"a\|b:\<c\>=1" in text


def test_json_is_one_document_with_the_numbers_of_the_tables(run: Run) -> None:
    """The JSON format parses, and each column's name is a key of its cells or audits."""
    document = json.loads(report(run, "json"))
    assert document["cells"][2]["decode_speedup"] == plain(run.cells[2].decode_speedup)
    assert document["banners"]
    assert len(document["conclusions"]) == 4
    for table in build(run).tables[:-1]:
        for column in table.columns[table.num_keys :]:
            assert column.name in document["cells"][0]
    for column in build(run).tables[-1].columns:
        assert column.name in document["audits"][0]


def test_every_metric_column_is_defined(run: Run) -> None:
    """Each column of a workload's table is a metric that `specbench explain` can explain."""
    for table in build(run).tables[:-1]:
        for column in table.columns[table.num_keys :]:
            assert column.name in DEFINITIONS


def test_an_unknown_format_is_refused(run: Run) -> None:
    """A near miss among the formats is suggested."""
    with pytest.raises(UsageError, match="did you mean 'markdown'"):
        report(run, "markdwon")  # type: ignore[arg-type]


# ---- Rows -------------------------------------------------------------------------------------------


def test_the_baseline_comes_first_and_is_marked(run: Run) -> None:
    """Per temperature: the baseline, its A/A row, then the strategies as they came."""
    shuffled = but(run, cells=list(reversed(run.cells)))
    table = next(table for table in build(shuffled).tables if table.title.startswith("predictable"))
    labels = [(row[1].text, row[0].text) for row in table.rows]
    assert labels[:2] == [("0", "ordinary (baseline)"), ("0", "ordinary again (A/A)")]
    assert labels[5:7] == [("1", "ordinary (baseline)"), ("1", "ordinary again (A/A)")]
    assert table.breaks == {5}


def test_what_was_not_measured_is_a_dash(run: Run) -> None:
    """A cell of which only counts are known prints dashes, and no zero."""
    values: dict[str, Any] = {
        field.name: None
        for field in dataclasses.fields(CellSummary)
        if "None" in str(field.type) and field.name not in ("key",)
    }
    bare = dataclasses.replace(run.cells[2], **values, dispatch={})
    table = build(but(run, cells=[bare], audits=[])).tables[0]
    assert {cell.text for cell in table.rows[0][2:]} == {wording.DASH}


def test_failures_are_shown(run: Run) -> None:
    """A cell with failed requests has a note under its table."""
    notes = [note for table in build(run).tables for note in table.notes]
    assert "draft:k=4, T=1: 2 of 36 requests failed" in notes


def test_rows_the_audit_rejects_say_so(run: Run) -> None:
    """A strategy that failed its audit, or is lossy, is marked in every row."""
    audits = [
        dataclasses.replace(run.audits[0], verdict="FAIL"),
        dataclasses.replace(run.audits[1], verdict="LOSSY"),
    ]
    labels = {row[0].text for table in build(but(run, audits=audits)).tables[:-1] for row in table.rows}
    assert {"ngram:k=4 (audit FAIL)", "draft:k=4 (lossy)"} <= labels


# ---- Banners ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": "running"}, "INCOMPLETE"),
        ({"busy": {"busy": True, "reasons": ["CPU steal 9 %"]}}, "BUSY MACHINE: CPU steal 9 %"),
        ({"config": {"engine": "simulated"}}, "no model was run"),
        ({"config": {"inject": "accept-all"}}, "'accept-all'"),
        ({"config": {"workloads": {"w": {"prompts": 12, "available": 32}}}}, "w 12 of 32 prompts"),
        ({"config": {"workloads": {"w": {"ignore_eos": True}}}}, "FORCED LENGTH"),
    ],
)
def test_reasons_to_doubt_are_at_the_top(run: Run, changes: dict[str, Any], words: str) -> None:
    """Each circumstance that spoils the numbers has its banner above the tables, in text and Markdown."""
    quiet = but(run, busy=None, config={}, status="complete", audits=[])
    assert build(quiet).banners == ()
    for format_ in get_args(Format)[:2]:
        text = report(but(quiet, **changes), format_, 200)
        assert words in text
        assert text.index(words) < text.index("decode speedup")


@pytest.mark.parametrize(("verdict", "words"), [("FAIL", "AUDIT FAILED"), ("LOSSY", "LOSSY: ngram:k=4")])
def test_verdicts_that_matter_are_banners(run: Run, verdict: Any, words: str) -> None:
    """A failed audit and a lossy strategy are named above the tables."""
    audits = [dataclasses.replace(run.audits[0], verdict=verdict)]
    assert any(words in banner for banner in build(but(run, audits=audits)).banners)


def test_an_empty_run_says_so(run: Run) -> None:
    """A run in which nothing was measured yet, and whose configuration is bare, still reports."""
    bare = Run("x", 1, "running", "", {}, {}, None)
    for format_ in get_args(Format):
        assert "Nothing has been measured yet" in report(bare, format_, 80)


# ---- Conclusions ------------------------------------------------------------------------------------


def test_a_clear_winner(run: Run) -> None:
    """A winner whose interval is above 1 and above the A/A row's is called fastest; losers are named."""
    text = fastest(run, again=(1.0, 0.98, 1.02), ngram=(1.42, 1.31, 1.55), exit=(0.71, 0.69, 0.74))
    assert text == "ngram:k=4 was fastest, 1.42x [1.31, 1.55]; lost: early-exit:k=3 (0.71x)"


def test_an_interval_that_holds_one_is_noise(run: Run) -> None:
    """A best strategy whose interval holds 1 did not win."""
    text = fastest(run, ngram=(1.03, 0.97, 1.10))
    assert text == "no winner; inside the noise: ngram:k=4 (1.03x [0.97, 1.10])"


def test_a_speedup_the_baseline_reaches_against_itself_is_noise(run: Run) -> None:
    """A narrow interval above 1 is still noise where the A/A row reaches as far, and that row is told."""
    text = fastest(run, again=(1.08, 1.01, 1.15), ngram=(1.10, 1.05, 1.16))
    assert text == (
        "no winner; inside the noise: ngram:k=4 (1.10x [1.05, 1.16]); "
        "ordinary against itself: 1.08x [1.01, 1.15]"
    )


@pytest.mark.parametrize(
    ("strategy", "again", "words"),
    [
        ((0.90, 0.85, 0.95), (1.0, 0.98, 1.02), "lost: draft:k=4 (0.90x)"),
        ((0.90, 0.85, 0.95), (0.97, 0.93, 1.01), "inside the noise: draft:k=4 (0.90x)"),
        ((0.90, 0.85, 0.95), (0.92, 0.89, 0.95), "inside the noise: draft:k=4 (0.90x)"),
        ((0.90, 0.85, 0.95), (1.1, 1.05, 1.15), "lost: draft:k=4 (0.90x)"),
        ((0.98, 0.95, 1.01), (1.0, 1.00, 1.00), "inside the noise: draft:k=4 (0.98x)"),
    ],
)
def test_losing_takes_more_than_the_noise(run: Run, strategy: Any, again: Any, words: str) -> None:
    """A strategy lost if its interval lies below 1 and below what ordinary scores against itself."""
    text = fastest(run, again=again, ngram=(1.42, 1.31, 1.55), draft=strategy)
    assert words in text
    is_the_reason = "noise" in words and strategy[2] < 1
    assert ("ordinary against itself" in text) is is_the_reason


def test_an_overlap_with_the_noise_is_told(run: Run) -> None:
    """A winner beyond the A/A row whose interval overlaps it is fastest, with that said."""
    text = fastest(run, again=(1.0, 0.9, 1.1), ngram=(1.12, 1.05, 1.2))
    assert text == (
        "ngram:k=4 was fastest, 1.12x [1.05, 1.20], though that overlaps the noise; "
        "ordinary against itself: 1.00x [0.90, 1.10]"
    )
    assert "no A/A row" in fastest(run, ngram=(1.12, 1.05, 1.2))


def test_the_winner_need_not_have_the_highest_value(run: Run) -> None:
    """A higher speedup inside the noise does not hide a lower one that is certain."""
    text = fastest(run, again=(1.0, 0.98, 1.02), ngram=(1.5, 0.8, 2.8), draft=(1.2, 1.15, 1.25))
    assert text == "draft:k=4 was fastest, 1.20x [1.15, 1.25]; inside the noise: ngram:k=4 (1.50x)"


def test_nothing_may_beat_ordinary(run: Run) -> None:
    """Where every strategy lost, the sentence says that ordinary decoding won."""
    text = fastest(run, ngram=(0.9, 0.85, 0.95), exit=(0.7, 0.6, 0.8))
    assert text == (
        "nothing beat ordinary decoding; lost: ngram:k=4 (0.90x [0.85, 0.95]) and early-exit:k=3 (0.70x)"
    )


def test_no_interval_is_no_certainty(run: Run) -> None:
    """A speedup without an interval is marked, and neither a win nor a loss."""
    text = fastest(run, again=(1.06, None, None), ngram=(1.4, None, None), exit=(0.7, None, None))
    assert text == (
        "no verdict: ngram:k=4 (1.40x†) and early-exit:k=3 (0.70x†); ordinary against itself: 1.06x†"
    )


def test_the_runners_up_are_told_apart_only_by_their_intervals(run: Run) -> None:
    """A rival whose interval overlaps the winner's is about as fast, one clear of it also faster."""
    text = fastest(run, ngram=(1.91, 1.73, 2.10), draft=(1.86, 1.76, 1.94), exit=(1.2, 1.1, 1.3))
    assert text.startswith("ngram:k=4 was fastest, 1.91x")
    assert "; about as fast: draft:k=4 (1.86x); also faster: early-exit:k=3 (1.20x)" in text


@pytest.mark.parametrize(
    ("estimate", "words"),
    [
        (Estimate(1.42, 1.31, 1.55, 5), None),
        (Estimate(1.42, 1.31, 1.55, 4), "‡ fewer than 5 prompts behind this interval, which is too narrow"),
        (Estimate(1.42, None, None, 1), "† one prompt only, so no interval and no verdict"),
    ],
)
def test_too_little_for_an_interval_is_marked(run: Run, estimate: Estimate, words: str | None) -> None:
    """An interval of fewer than five prompts, or none, is marked in table and answer, and explained."""
    cells = [
        dataclasses.replace(cell, decode_speedup=estimate) if cell.key.strategy == "ngram:k=4" else cell
        for cell in cells_of(run, "predictable", 0.0)
    ]
    built = build(but(run, cells=cells))
    (shown,) = [row[2].text for row in built.tables[0].rows if row[0].text == "ngram:k=4"]
    explained = [note for note in built.tables[0].notes if note[0] in "†‡"]
    assert list(built.footnotes) == explained
    if words is None:
        assert shown == "1.42 [1.31, 1.55]"
        assert not explained
        return
    assert [note.startswith(words) for note in explained] == [True]
    assert shown.endswith(words[0])
    assert f"1.42x{shown.removeprefix('1.42')}" in built.conclusions[0]
    for format_ in get_args(Format)[:2]:
        assert words in report(but(run, cells=cells), format_, 200)


def test_a_throughput_of_one_repeat_is_marked_in_repeats(run: Run) -> None:
    """A throughput ratio without a range names the repeats, and how to get more of them."""
    config = {"workloads": {"predictable": {"headline": "throughput"}}}
    cells = [
        dataclasses.replace(cell, throughput_ratio=Estimate(0.9, None, None, 1))
        for cell in cells_of(run, "predictable", 0.0)
    ]
    built = build(but(run, cells=cells, config=config))
    assert built.footnotes == ("† one repeat only, so no interval and no verdict; add --repeats 5.",)
    assert built.conclusions[0].startswith("predictable, T=0, throughput: no verdict: ngram:k=4 (0.90x†)")
    assert {row[2].text for row in built.tables[0].rows} == {"1", "0.90†"}


def test_without_rivals_there_is_no_claim(run: Run) -> None:
    """Ordinary decoding alone, or rivals without a speedup, give no ranking."""
    cells = cells_of(run, "predictable", 0.0)
    assert "only ordinary" in what_was_fastest(cells[:2], HEADLINES["decode"])
    silent = [dataclasses.replace(cell, decode_speedup=None) for cell in cells]
    assert "no speedup was measured" in what_was_fastest(silent, HEADLINES["decode"])


def audit(run: Run, strategy: str, verdict: Any, **changes: Any) -> ChiSquaredVerdict:
    return dataclasses.replace(run.audits[0], strategy=strategy, verdict=verdict, **changes)


def test_the_weakest_audit_speaks_for_all(run: Run) -> None:
    """Where all passed, the largest of their smallest detectable distances is quoted."""
    audits = [
        audit(run, "a", "PASS", smallest_detectable_tv=0.02),
        audit(run, "b", "PASS", smallest_detectable_tv=0.046),
    ]
    assert whether_it_held(audits, ["a", "b"]) == (
        "Output distribution: held (chi-squared at T=1, smallest detectable TV 0.046)."
    )


def test_every_verdict_is_told(run: Run) -> None:
    """Failed, passed, lossy, undecided and unchecked strategies are each named with what they are."""
    audits = [
        audit(run, "f", "FAIL", p_value=2e-9),
        audit(run, "p", "PASS"),
        audit(run, "l", "LOSSY"),
        audit(run, "i", "INCONCLUSIVE"),
    ]
    text = whether_it_held(audits, ["f", "p", "l", "i", "n"])
    for words in (
        "DID NOT HOLD for f (p = 2e-09)",
        "held for p (",
        "by design for l",
        "judged for i",
        "not checked for n",
    ):
        assert words in text
    assert whether_it_held([], ["n"]) == "Output distribution: not checked."


def test_a_baseline_that_fails_its_audit_is_told(run: Run) -> None:
    """Ordinary decoding that fails the audit casts doubt on everything, so the sentence names it."""
    audits = [audit(run, "ordinary", "FAIL", p_value=1e-6), audit(run, "a", "PASS")]
    assert "DID NOT HOLD for ordinary (p = 1e-06); held (" in whether_it_held(audits, ["a"], "ordinary")


def test_each_condition_has_one_conclusion_by_its_own_headline(run: Run) -> None:
    """There is a line per workload and temperature, then the audit; short output is judged end to end."""
    greedy, sampled, short, audited = build(run).conclusions
    assert greedy.startswith("predictable, T=0: ngram:k=4 was fastest, 1.42x [1.31, 1.55]")
    assert sampled.startswith("predictable, T=1: draft:k=4 was fastest, 1.09x")
    assert short.startswith("short-output, T=0, end to end: no winner; inside the noise: ngram:k=4 (0.99x")
    assert audited.startswith("Output distribution: held for ngram:k=4 and draft:k=4")


@pytest.mark.parametrize("format_", ["terminal", "markdown"])
def test_the_answer_comes_before_the_tables_and_the_setting_last(run: Run, format_: Any) -> None:
    """Title, reasons to doubt, answer, tables, legend or setting: in this order."""
    text = report(run, format_, 200)
    marks = ["specbench run", "BUSY MACHINE", "Against ordinary", "was fastest", "Output dist", "load c=1"]
    places = [text.index(words) for words in [*marks, "Example CPU"]]
    assert places == sorted(places)


def test_loads_are_told_apart(run: Run) -> None:
    """A workload at two loads has a table for each, and conclusions that name them."""
    more = [dataclasses.replace(c, key=dataclasses.replace(c.key, load="c=8")) for c in run.cells]
    built = build(but(run, cells=[*run.cells, *more]))
    assert [t.title.split(",")[0] for t in built.tables[:2]] == [
        "predictable: load c=1",
        "short-output: load c=1",
    ]
    assert len(built.tables) == 5
    assert [line.partition(":")[0] for line in built.conclusions[:4]] == [
        "predictable c=1, T=0",
        "predictable c=1, T=1",
        "predictable c=8, T=0",
        "predictable c=8, T=1",
    ]


def test_what_grammars_did_is_told(run: Run) -> None:
    """A workload measured with and without its grammars has a line a temperature on what they did."""
    twins = []
    for cell in run.cells:
        rate = cell.draft_acceptance_rate
        if cell.key.workload == "predictable":
            key = dataclasses.replace(cell.key, workload="predictable-free")
            halved = None if rate is None else rate / 2
            verify = None if cell.verify_s is None else 2 * cell.verify_s
            twins.append(dataclasses.replace(cell, key=key, draft_acceptance_rate=halved, verify_s=verify))
    entry = {**run.config["workloads"]["predictable"], "twin_of": "predictable"}
    config = {**run.config, "workloads": {**run.config["workloads"], "predictable-free": entry}}
    told = list(build(but(run, cells=[*run.cells, *twins], config=config)).conclusions)
    (greedy, sampled) = [line for line in told if "with grammars against without" in line]
    assert greedy.startswith("predictable c=1, T=0, with grammars against without: ordinary (verify ")
    assert sampled.startswith("predictable c=1, T=1, with")
    assert "#2" not in greedy
    cells = {cell.key.strategy: cell for cell in cells_of(run, "predictable", 0.0)}
    rate, verify = cells["ngram:k=4"].draft_acceptance_rate, cells["ngram:k=4"].verify_s
    assert rate is not None
    assert verify is not None
    times = f"{wording.milliseconds(verify)} against {wording.milliseconds(2 * verify)} ms"
    assert f"ngram:k=4 (draft acceptance rate {rate:.2f} against {rate / 2:.2f}, verify {times})" in greedy
    assert not [line for line in build(run).conclusions if "with grammars" in line]


def test_dispatch_is_shown_and_explained_where_there_is_something_to_tell(run: Run) -> None:
    """The column is left out while every step is eager, and otherwise comes with its legend."""
    assert "dispatch" not in report(run, "markdown")
    graphs = dataclasses.replace(run.cells[2], dispatch={"graph": 97, "eager": 3})
    text = report(but(run, cells=[run.cells[0], graphs]), "markdown")
    assert "graph 97 %, eager 3 %" in text
    assert "replaying a CUDA graph" in text


@pytest.mark.parametrize(
    ("headline", "field"),
    [
        ("decode", "decode_speedup"),
        ("e2e", "e2e_speedup"),
        ("throughput", "throughput_ratio"),
        (None, "decode_speedup"),
    ],
)
def test_the_headline_is_the_workloads(headline: str | None, field: str) -> None:
    """The configuration names the speedup; without it decode speedup is shown."""
    assert headline_of({"headline": headline} if headline else {}).field == field


# ---- Wording ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (1234.5, "1234"),
        (61.25, "61.2"),
        (8.0, "8.00"),
        (0.21, "0.210"),
        (0.00004, "4.0e-05"),
    ],
)
def test_significant(value: float | None, text: str) -> None:
    """Numbers have three significant digits; nothing that was measured reads as zero."""
    assert wording.significant(value) == text


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((0, 0, int(1.2 * 2**20)), "0 + 0 + 1.2 MiB"),
        ((2 * 2**30, None, 2**20), "2.0 + – + 9.8e-04 GiB"),
        ((0, 0, 0), "0 + 0 + 0"),
        ((None, None, None), "–"),
        ((0, 0, 512), "0 + 0 + 512 B"),
    ],
)
def test_sizes(parts: tuple[int | None, ...], text: str) -> None:
    """Sizes share the unit of the largest; unknown parts are dashes."""
    assert wording.sizes(parts) == text


def test_other_wordings() -> None:
    """Intervals, distributions, shares and p-values are written one way."""
    assert wording.interval(Estimate(1.234, 1.18, 1.291, 9)) == "1.23 [1.18, 1.29]"
    assert wording.interval(Estimate(1.234, None, None, 1)) == "1.23†"
    assert wording.interval(Estimate(1.234, 1.18, 1.291, 4)) == "1.23 [1.18, 1.29]‡"
    assert wording.interval(None) == "–"
    assert wording.distribution(Distribution(0.1, 0.0123, 0.25, 9)) == "12.3/250"
    assert wording.shares({"graph": 97, "eager": 3}) == "graph 97 %, eager 3 %"
    assert wording.shares({"eager": 3}) == "eager"
    assert wording.shares({}) == "–"
    assert wording.probability(0.0432) == "0.043"
    assert wording.probability(3e-7) == "3e-07"
    assert wording.listing(["a", "b", "c"]) == "a, b and c"


@pytest.mark.parametrize(
    ("alpha", "text"), [(1 / 3000, "< 4e-05"), (5e-4, "< 5e-05"), (1e-4, "< 1e-05"), (0.05, "< 0.005")]
)
def test_a_p_value_at_its_floor_is_a_bound(alpha: float, text: str) -> None:
    """Where no simulated table was as extreme, p is printed as a bound that holds; else as a value."""
    generator = np.random.default_rng(0)
    p = stats.monte_carlo_p_value([[900, 100]], [[0.5, 0.5]], generator=generator, alpha=alpha)
    assert wording.monte_carlo(p, alpha) == text
    assert p < float(text.removeprefix("< "))
    assert wording.monte_carlo(2 * p, alpha) == wording.probability(2 * p)
    assert wording.monte_carlo(None, alpha) == wording.DASH


def test_the_floor_is_shown_in_table_and_sentence(run: Run) -> None:
    """A strategy rejected by every simulated table reads p < ..., never p = ..."""
    failed = audit(run, "ngram:k=4", "FAIL", p_value=stats.smallest_p_value(1e-4), alpha=1e-4)
    built = build(but(run, audits=[failed]))
    assert "DID NOT HOLD for ngram:k=4 (p < 1e-05)" in built.conclusions[-1]
    assert "< 1e-05" in {cell.text for cell in built.tables[-1].rows[0]}
