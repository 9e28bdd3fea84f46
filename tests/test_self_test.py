"""The self-test: cases, what is kept of them, resumption, workers, and what the command says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbench import environment
from specbench.audit import self_test
from specbench.audit.self_test import Job, Result, cases, outcome
from specbench.bench.self_test import run, said
from specbench.cli import main

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


class Heard:
    """Progress that remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.done = 0

    def stage(self, text: str, total: int | None = None) -> None:
        """Ignore."""

    def advance(self, amount: int = 1, text: str | None = None) -> None:
        """Count."""
        self.done += amount

    def say(self, text: str) -> None:
        """Remember."""
        self.lines.append(text)


class Audits:
    """Stands in for `Bench`: alarms on faults unless told otherwise, and remembers what was asked."""

    def __init__(self, alarms: Callable[[Job], bool] = lambda job: job.case.fault is not None) -> None:
        self.alarms = alarms
        self.asked: list[str] = []
        self.stop_after: int | None = None

    def __call__(self) -> Callable[[Job], Result]:
        """Be made."""
        return self.audit

    def audit(self, job: Job) -> Result:
        """Return something that tells seeds apart."""
        if len(self.asked) == self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(str(job))
        name, seed = job.case.name, job.seed
        if not self.alarms(job):
            return Result(name, seed, (), None, None, None, None)
        return Result(name, seed, ("e-process",), 100 + seed, 0.1 * seed, "draft-mix:1", "bad")


@pytest.fixture
def audits(monkeypatch: Patch) -> Audits:
    """Put scripted audits in the place of real ones."""
    scripted = Audits()
    monkeypatch.setattr(self_test, "Bench", scripted)
    versions = {"specbench": "1", "torch": "2"}
    monkeypatch.setattr(environment, "fingerprint", lambda: {"versions": versions})  # git takes a while
    return scripted


TWO = cases(["accept-all", "draft:k=3"])
COMMAND = ["self-test", "--workers", "1", "--fault", "accept-all", "--fault", "draft:k=3"]


def carried_out(output: Path | None, seeds: int) -> list[self_test.Outcome]:
    return run(TWO, seeds=seeds, num_workers=1, output=output, progress=Heard())


@pytest.mark.slow
def test_workers_find_what_one_process_finds() -> None:
    """Outcomes are equal with two workers and in one process, which audits one after the other."""
    chosen = cases(["top-p-twice", "accept-all"])
    alone, shared = Heard(), Heard()
    first = run(chosen, seeds=2, num_workers=1, output=None, progress=alone)
    assert run(chosen, seeds=2, num_workers=2, output=None, progress=shared) == first
    assert [found.case for found in first] == ["accept-all", "top-p-twice"]
    assert all(found.is_right and found.caught == 2 for found in first)
    assert shared.lines == alone.lines  # in the order of the cases, whoever was first


def test_what_shows_in_no_token_is_caught_with_few() -> None:
    """A fault of records, contracts or log-probabilities alone is not sampled for long."""
    chosen = cases(["logprobs-missing", "eos-called-length", "bonus-counted-as-accepted"])
    assert {case.tokens for case in chosen} == {self_test.UNSAMPLED_TOKENS}
    assert self_test.Bench()(Job(cases(["bonus-counted-as-accepted"])[0], 0)).by == ("identities",)
    # What shows nowhere is looked for as long as anything.
    assert {case.tokens for case in cases() if case.expected != "caught"} == {self_test.TOKENS}


def test_an_interruption_keeps_what_was_done(audits: Audits, tmp_path: Path) -> None:
    """Every result is in the file when it is reached, and a rerun audits only what is missing."""
    path = tmp_path / "new" / "self-test.json"
    audits.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        carried_out(path, 2)
    stored = json.loads(path.read_text())
    assert [(entry["case"], entry["seed"]) for entry in stored["results"]] == [
        ("accept-all", 0),
        ("accept-all", 1),
        ("draft:k=3", 0),
    ]
    audits.stop_after = None
    found = carried_out(path, 2)
    assert audits.asked[3:] == ["draft:k=3, seed 1"]
    assert found == carried_out(None, 2)


def test_more_seeds_add_to_those_done(audits: Audits, tmp_path: Path) -> None:
    """A rerun with more seeds audits the new ones only; the file's other cases stay in the table."""
    path = tmp_path / "self-test.json"
    carried_out(path, 1)
    progress = Heard()
    found = run(TWO[:1], seeds=3, num_workers=1, output=path, progress=progress)
    assert audits.asked == [
        "accept-all, seed 0",
        "draft:k=3, seed 0",
        "accept-all, seed 1",
        "accept-all, seed 2",
    ]
    assert progress.done == 3
    assert progress.lines == ["accept-all: caught 3 of 3 by e-process"]
    assert [(o.case, o.caught, o.seeds, o.tokens, o.tokens_range) for o in found] == [
        ("accept-all", 3, 3, 101, (100, 102)),
        ("draft:k=3", 0, 1, None, None),
    ]
    assert (found[0].tv, found[0].alternative, found[0].regime) == (0.1, "draft-mix:1", "bad")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: text.rindex("draft:k=3")], "is not readable JSON"),
        (
            lambda text: text.replace('"tokens": 100', '"amount": 100').replace('"seed"', '"sed"'),
            "is damaged",
        ),
        (lambda text: text.replace('"self-test"', '"audit"'), "is no self-test of specbench"),
        (lambda text: text.replace('"torch": "', '"torch": "0.'), "other software; it differs in torch"),
        (lambda text: text.replace('"sources": "', '"sources": "0'), "other software; it differs in sources"),
    ],
)
def test_a_file_that_cannot_be_gone_on_with_is_left_alone(
    damage: Callable[[str], str], words: str, audits: Audits, tmp_path: Path, capsys: Captured
) -> None:
    """A torn file, one of something else and one of other software: one line, exit code 2, nothing lost."""
    path = tmp_path / "self-test.json"
    command = [*COMMAND, "--seeds", "1", "--output", str(path)]
    assert main(command) == 0
    text = damage(path.read_text())
    assert text != path.read_text()
    path.write_text(text)
    capsys.readouterr()
    assert main(command) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert len([line for line in shown.err.splitlines() if line.startswith("error: ")]) == 1
    assert (shown.out, path.read_text()) == ("", text)


def test_the_command_writes_a_table_beside_the_results(
    audits: Audits, tmp_path: Path, capsys: Captured
) -> None:
    """Caught k of n, the median of the tokens and their range, and where the effect is."""
    path = tmp_path / "self-test.json"
    assert main([*COMMAND, "--seeds", "3", "--output", str(path)]) == 0
    table = path.with_suffix(".md").read_text()
    row = next(line for line in table.splitlines() if "accept-all" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")][3:] == [
        "3/3",
        "e-process",
        "101 (100–102)",
        "0.10",
        "bad",
        "draft-mix:1",
    ]
    assert "1 of 1 faults" in table
    assert "0 of 3 audits of 1 decoders" in table
    assert "100–102" in capsys.readouterr().out


def test_no_effect_is_no_negative_zero(audits: Audits, monkeypatch: Patch, capsys: Captured) -> None:
    """An estimate just below 0 is shown as 0.00."""
    below = Result("accept-all", 0, ("e-process",), 9, -0.001, "draft-mix:1", "bad")
    monkeypatch.setattr(audits, "audit", lambda job: below)
    assert main(["self-test", "--workers", "1", "--seeds", "1", "--fault", "accept-all"]) == 0
    assert " 0.00 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("alarms", "words"),
    [
        (
            lambda job: job.seed == 0 and job.case.fault is not None,
            "accept-all: caught 1 of 2 by e-process, MISSED",
        ),
        (lambda job: False, "accept-all: no alarm in 2, MISSED"),
        (lambda job: True, "draft:k=3: caught 2 of 2 by e-process, ACCUSED WRONGLY"),
    ],
)
def test_what_is_wrong_is_said_and_exits_with_1(
    alarms: Callable[[Job], bool], words: str, audits: Audits, capsys: Captured
) -> None:
    """A fault that is missed under one seed, under all, and an innocent accused."""
    audits.alarms = alarms
    assert main([*COMMAND, "--seeds", "2"]) == 1
    shown = capsys.readouterr()
    assert words in shown.err
    assert " !" in shown.out


def test_a_rounding_too_small_may_go_either_way() -> None:
    """It is no mistake to catch it, nor not to."""
    case = cases(["ratio-in-bfloat16"])[0]
    for by in ((), ("e-process",)):
        found = outcome(case, [Result(case.name, 0, by, None, None, None, None)])
        assert found.is_right
        assert "WRONGLY" not in said(found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fault", "accept-al"], "did you mean 'accept-all'"),
        (["--output", "table.md"], "expected a name that ends in .json"),
        (["--workers", "0"], "--workers: expected 1 or more"),
        (["--seeds", "0"], "--seeds: expected 1 or more"),
        (["--output", "file/self-test.json"], "cannot write to file"),
    ],
)
def test_bad_calls_say_so_in_one_line(
    arguments: list[str], words: str, audits: Audits, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    """Exit code 2 before anything is audited."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["self-test", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert (shown.out, audits.asked) == ("", [])


def test_json_holds_every_outcome(audits: Audits, capsys: Captured) -> None:
    """One document on stdout, with the field names of the table's columns."""
    assert main([*COMMAND, "--quick", "--json"]) == 0
    shown: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [(o["case"], o["caught"], o["seeds"], o["is_right"]) for o in shown] == [
        ("accept-all", 1, 1, True),
        ("draft:k=3", 0, 1, True),
    ]
