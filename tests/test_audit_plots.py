"""The plots of an audit: files that are equal for equal records, and that an audit writes on request."""

from __future__ import annotations

import doctest
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from specbench.audit.verdicts import AuditRecord, CellCount, ChiSquaredVerdict, PooledTable, Traces
from specbench.cli import main
from specbench.report import audit_plots
from specbench.report.audit_plots import PLOTS, cell_label, file_name, left_out, write_plots

Captured = pytest.CaptureFixture[str]
TABLE = PooledTable(
    prompt=(5, 6),
    text="costs $5 or $6:\n",
    cells=(
        CellCount((1, 2), " a $b", True, 55.0, 70),
        CellCount((1,), " 模型\t", False, 30.0, 20),
        CellCount(None, None, False, 15.0, 10),
    ),
)


def record(strategy: str = "draft:k=3,verify=block", **changes: Any) -> AuditRecord:
    """Return the record of an audit that alarmed after 30 of 60 tokens."""
    checked = ChiSquaredVerdict(
        strategy=strategy,
        verdict="FAIL",
        reason="",
        lossless_claimed=True,
        dtype="float32",
        temperature=1.0,
        top_k=3,
        prompts=2,
        draws=200,
        horizon=6,
        statistic=9.0,
        df=2,
        p_value=0.011,
        alpha=1e-4,
        tv_observed=0.1,
        tv_upper=0.2,
        smallest_detectable_tv=0.1,
        out_of_support=0,
        drafted=90,
        accepted=50,
        rejections=20,
        fully_accepted=5,
        seconds=0.0,
        tables=(TABLE, replace(TABLE, text=None, cells=TABLE.cells[:1])),
    )
    made = AuditRecord(
        strategy=strategy,
        verdict="FAIL",
        reasons=("an alarm",),
        components=(),
        budget="test",
        promised_tv=0.1,
        tokens=60,
        sequences=2,
        prompts=1,
        dtype="float32",
        alpha=1e-3,
        log_e=900.0,
        bar=6.9,
        tokens_at_alarm=30,
        family="lean",
        alternative="lean-to-draft:0.1",
        regime="own",
        effect=None,
        detectable={},
        acceptance={},
        drafted=90,
        accepted=50,
        rejected=20,
        contracts_held=1,
        contracts_tried=1,
        chi_squared=checked,
        lossless_claimed=True,
        seconds={},
        traces=Traces(
            tokens=(0, 20, 30, 60),
            log_e=(0.0, -1.0, 7.0, 900.0),  # e itself is beyond what a float holds
            log_e_by_regime={"own": (0.0, -1.0, 8.0, 901.0), "bad": (0.0, 0.0, 0.0, 0.0)},
            pit={"own": (3,) * 20, "bad": (0,) * 20},
        ),
    )
    return replace(made, **changes)


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(audit_plots).failed == 0


def test_each_kind_is_a_file_that_names_its_strategy(tmp_path: Path) -> None:
    """Well-formed SVG, one for each strategy and kind; nothing else is left in the folder."""
    written = write_plots([record("ordinary"), record()], tmp_path / "new" / "folder")
    assert sorted(written) == sorted((tmp_path / "new" / "folder").iterdir())
    assert [path.name for path in written] == [
        f"{name}-{kind}.svg" for name in ("0-ordinary", "1-draft-k-3-verify-block") for kind in PLOTS
    ]
    for path, strategy in zip(written, ["ordinary"] * 3 + ["draft:k=3,verify=block"] * 3, strict=True):
        content = path.read_text("utf-8")
        assert ElementTree.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
        assert f"<!-- {strategy}: FAIL" in content  # how matplotlib says which letters its shapes are


def test_what_a_reader_needs_is_written_in_the_figures(tmp_path: Path) -> None:
    """The bar has its name and the alarm its place; PIT says what it is not; cells have their words."""
    evidence, pit, cells = (path.read_text("utf-8") for path in write_plots([record()], tmp_path))
    for said in ("alarm at 1/α = 992", "alarm after 30 tokens", "regime own", "$10^{300}$", "e-value"):
        assert said in evidence
    assert "regime bad" not in evidence  # nothing was scored there
    assert "a picture, not a verdict" in pit
    assert "own: 60 tokens" in pit
    for said in ("p = 0.011, df 2", "all others", "standardised residual", "5 6"):
        assert said in cells
    quiet = record(tokens_at_alarm=None, injected="accept-all")
    evidence = write_plots([quiet], tmp_path)[0].read_text("utf-8")
    assert "alarm after" not in evidence
    assert "with fault 'accept-all'" in evidence


def test_equal_records_give_equal_files(tmp_path: Path) -> None:
    """No date, no random ids, and a user's own style of matplotlib changes nothing."""
    first = write_plots([record()], tmp_path / "first")
    with mpl.rc_context({"lines.linewidth": 9.0, "font.size": 30, "svg.hashsalt": None, "axes.grid": False}):
        second = write_plots([record()], tmp_path / "second")
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    changed = write_plots([record(bar=20.0)], tmp_path / "third")
    assert changed[0].read_bytes() != first[0].read_bytes()


@pytest.mark.parametrize("strategy", ["draft:path=/a/$b$--<c>&,k=3", "ngram:模型\x07", "x" * 300, ":"])
def test_odd_names_are_drawn(strategy: str, tmp_path: Path) -> None:
    """Mathematics, markup, letters that the font lacks and long names harm neither figures nor files."""
    for path in write_plots([record(strategy)], tmp_path):
        assert path.parent == tmp_path
        assert set(path.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")
        ElementTree.fromstring(path.read_text("utf-8"))


def test_names_that_look_alike_do_not_meet() -> None:
    """The number keeps the files of two strategies apart."""
    assert file_name(1, "ngram:k=4", "pit") != file_name(2, "ngram,k:4", "pit")


def test_a_cell_says_what_it_holds() -> None:
    """A whole continuation, a beginning, or the rest; ids where there is no text."""
    assert [cell_label(cell) for cell in TABLE.cells] == ["' a $b'", "' 模型\\t' …", "all others"]
    assert cell_label(CellCount((4, 5), None, False, 1.0, 1)) == "4 5 …"
    assert len(cell_label(CellCount((4,), "long " * 20, False, 1.0, 1))) <= audit_plots.LONGEST_LABEL


def test_what_is_not_there_is_not_drawn(tmp_path: Path) -> None:
    """A record of an older version, or one that stopped at its alarm, has fewer plots, and is said why."""
    older = record(traces=None, chi_squared=replace(record().chi_squared, tables=()))  # type: ignore[type-var]
    assert write_plots([older], tmp_path) == []
    assert [line.partition(": ")[2] for line in left_out(older)] == [
        "no e-value and PIT plots: stored before their numbers were kept",
        "no chi-squared plot: its cells were not stored",
    ]
    stopped = record(chi_squared=None)
    assert [path.name for path in write_plots([stopped], tmp_path)] == [
        file_name(0, stopped.strategy, kind) for kind in ("e-value", "pit")
    ]
    assert len(list(left_out(stopped))) == 1
    assert not list(left_out(record()))


# On the command line


def test_without_matplotlib_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """One line that says what to install, before anything is loaded or written."""
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["audit", "--plots", str(tmp_path / "plots"), "--output", str(tmp_path / "results")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[0] == "error: plots need matplotlib, which is not installed"
    assert "pip install 'specbench-llm[plots]'" in said
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_refused_at_once(tmp_path: Path, capsys: Captured) -> None:
    """A file in its place is named, with the option to change."""
    (tmp_path / "plots").write_text("")
    words = ["audit", "--plots", str(tmp_path / "plots"), "--output", str(tmp_path / "results")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"cannot write to {tmp_path / 'plots'}" in said
    assert "choose another --plots" in said
    assert not (tmp_path / "results").exists()
