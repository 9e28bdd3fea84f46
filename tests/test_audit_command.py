"""`specbench audit` on the bundled pair: verdicts, exit codes, resumption, replay, bad calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench.audit import session
from specbench.bench import audit
from specbench.bench.audit import AuditConfig, AuditDocument
from specbench.cli import main
from specbench.errors import UsageError

Captured = pytest.CaptureFixture[str]


class Silent:
    """Progress that nobody sees."""

    def stage(self, text: str, total: int | None = None) -> None:
        """Ignore."""

    def advance(self, amount: int = 1, text: str | None = None) -> None:
        """Ignore."""

    def say(self, text: str) -> None:
        """Ignore."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_fault_is_caught_and_can_be_looked_at(tmp_path: Path, capsys: Captured) -> None:
    """Exit code 1, the fault's name, its effect, and the worst position again."""
    words = "audit --strategy ngram:k=4 --inject accept-all --tokens 5000 --run-id broken --explain --output"
    assert main([*words.split(), str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "fault 'accept-all' was injected" in shown
    assert "effect: TV at least" in shown
    document = AuditDocument.open(tmp_path / "broken")
    assert [record.verdict for record in document.records][1] == "FAIL"
    assert document.status == "complete"
    assert main(["audit", "--replay", str(tmp_path / "broken" / "worst-1.json")]) == 0
    assert "the target's likeliest here" in capsys.readouterr().out
    damaged = json.loads((tmp_path / "broken" / "worst-1.json").read_text())
    damaged["place"]["token"] = (damaged["place"]["token"] + 1) % 1024
    (tmp_path / "other.json").write_text(json.dumps(damaged))
    assert main(["audit", "--replay", str(tmp_path / "other.json")]) == 2
    assert "gives another output" in capsys.readouterr().err


def test_lower_precision_is_audited_beyond_its_floor(tmp_path: Path, capsys: Captured) -> None:
    """Exit code 1 for a large fault, the floor beside it, and what cannot be judged is said."""
    words = "audit --dtype bfloat16 --strategy draft:k=2 --inject accept-all --sampling top_k=5 --tokens 600"
    assert main([*words.split(), "--run-id", "rounded", "--output", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "rounding moves what top_k cut off" in shown.err
    flat = " ".join(shown.out.split())
    assert "In bfloat16 ordinary decoding itself is TV 0.00" in flat
    assert "a float32 copy of its weights" in flat
    records = AuditDocument.open(tmp_path / "rounded").records
    assert [record.verdict for record in records] == ["INCONCLUSIVE", "FAIL"]
    assert records[0].floor is not None
    assert records[0].floor.rows[0].tokens > 0
    assert records[0].dtype == "bfloat16"


def test_too_few_tokens_end_inconclusive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Exit code 3 and the reason, never PASS. On request it is drawn, also when nothing is left to audit."""
    words = ["audit", "--strategy", "ngram:k=4", "--tokens", "200", "--json", "--run-id", "small"]
    words += ["--output", str(tmp_path)]
    assert main([*words, "--plots", str(tmp_path / "plots")]) == 3
    stored = json.loads(capsys.readouterr().out)
    assert {record["verdict"] for record in stored["records"]} == {"INCONCLUSIVE"}
    assert any("too few tokens" in reason for reason in stored["records"][1]["reasons"])
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    assert len(drawn) == 6
    assert b"takefocus" in drawn["1-ngram-k-4-chi-squared.svg"]  # a cell's words, not its ids
    monkeypatch.setattr(session, "audit", None)
    assert main([*words, "--plots", str(tmp_path / "again")]) == 3
    assert "6 plots in" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == drawn


def test_an_interrupted_audit_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was concluded stays; what was under way begins again under other seeds."""
    config = AuditConfig("tiny", "tiny-draft", strategies=("ngram:k=4",), tokens=100)
    seeds = []
    original = session.audit

    def stopping(subject: Any, name: str, **options: Any) -> Any:
        seeds.append((name, subject.seed))
        if name != "ordinary" and len(seeds) == 2:
            raise KeyboardInterrupt
        return original(subject, name, **options)

    monkeypatch.setattr(session, "audit", stopping)
    with pytest.raises(KeyboardInterrupt):
        audit.run(config, tmp_path, Silent(), run_id=None, fresh=False)
    folder = next(tmp_path.glob("*-audit-*"))
    assert AuditDocument.open(folder).status == "interrupted"
    document = audit.run(config, tmp_path, Silent(), run_id=None, fresh=False)
    assert document.folder == folder
    assert [record.strategy for record in document.records] == ["ordinary", "ngram:k=4"]
    assert [name for name, _ in seeds] == ["ordinary", "ngram:k=4", "ngram:k=4"]
    assert seeds[1][1] != seeds[2][1]
    other = AuditConfig("tiny", "tiny-draft", strategies=("ngram:k=4",), tokens=101)
    with pytest.raises(UsageError, match="asked something else"):
        audit.run(other, tmp_path, Silent(), run_id=folder.name, fresh=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "huge"], "no budget 'huge'"),
        (["--dtype", "float31"], "no dtype 'float31'"),
        (["--temperature", "0"], "--temperature is 0"),
        (["--tokens", "0"], "--tokens"),
        (["--inject", "accept-al"], "did you mean 'accept-all'"),
        (["--strategy", "ngrm:k=4"], "did you mean 'ngram'"),
        (["--sampling", "top_q=1"], "top_q=1"),
        (["--models", "tiny", "--target", "tiny"], "both name the target"),
        (["--models", "tny"], "did you mean 'tiny'"),
        (["--replay", "nowhere.json"], "cannot read position"),
    ],
)
def test_bad_calls_say_so_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: Captured
) -> None:
    """Exit code 2, one line and a hint, nothing written."""
    assert main(["audit", *arguments, "--output", str(tmp_path / "results")]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""
    assert "Traceback" not in shown.err
    assert not (tmp_path / "results").exists()
