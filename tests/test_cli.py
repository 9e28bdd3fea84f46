"""The command line: exit codes, one-line errors, help that fits, and what each command prints."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

import specbench
from specbench import cli
from specbench.cli import _runs, app, list_, main
from specbench.cli._progress import RichProgress
from specbench.errors import CheckFailed, NotMeasured, UsageError
from specbench.metrics.definitions import DEFINITIONS

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"
COMMANDS = sorted(str(info.name) for info in app.registered_commands)

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def raising(problem: BaseException) -> Any:
    def command(*_: Any, **__: Any) -> None:
        raise problem

    return command


def assert_error(captured: Any, *words: str) -> None:
    """Assert that stderr is one line, or one line, a blank and a hint; and stdout is empty."""
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 or (len(lines) == 3 and lines[1] == "" and lines[2].startswith("hint: "))
    for word in words:
        assert word in captured.err


# ---- Errors and exit codes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reprot"], ["no command 'reprot'; did you mean 'report'?", "`specbench --help`"]),
        (["report", "--fromat", "json"], ["no option '--fromat'; did you mean '--format'?"]),
        (["report", "--width", "3"], ["--width: expected 40 or more", "`specbench report --help`"]),
        (["report", "--width", "wide"], ["--width: expected a whole number"]),
        (["run", "--limit", "0"], ["--limit: expected 1 or more", "`specbench run --help`"]),
        (["run", "--temperature", "hot"], ["--temperature: expected a number"]),
        (["report", "--width"], ["--width"]),
        (["report", "a", "b"], ["unexpected"]),
        (["report", "--format", "markdwon", str(GOLDEN / "run")], ["did you mean 'markdown'?"]),
        (["report", "--format", "html", str(GOLDEN / "run")], ["no format 'html'\n", "markdown, json"]),
        (["run", "--format", "html"], ["no format 'html'\n", "markdown, json"]),
        (["explain"], ["missing argument"]),
        (["explain", "ttff"], ["did you mean 'ttft'?"]),
        (["list", "strategy"], ["did you mean 'strategies'?"]),
        (["report", "results/none"], ["no run 'results/none'", "latest"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage_exits_2_with_one_line(
    arguments: list[str], words: list[str], capsys: Captured, in_empty_folder: Path
) -> None:
    """Whatever is wrong with a call, stderr holds one line and a way out, and the exit code is 2."""
    assert main(arguments) == 2
    assert_error(capsys.readouterr(), *words)


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (UsageError("wrong", hint="try this"), 2),
        (CheckFailed("slower\nthan before"), 1),
        (NotMeasured("too busy"), 3),
        (ZeroDivisionError("oops"), 3),
    ],
)
def test_errors_have_their_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, problem: Exception, code: int
) -> None:
    """Each branch of the error tree has its exit code; the unexpected counts as not measured."""
    monkeypatch.setattr(_runs, "run_folder", raising(problem))
    monkeypatch.setattr("specbench.cli.report.run_folder", raising(problem))
    assert main(["report"]) == code
    assert_error(capsys.readouterr())


def test_the_unexpected_names_itself(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """An internal error is one line with its type and the option that shows more."""
    monkeypatch.setattr("specbench.cli.report.run_folder", raising(ZeroDivisionError("oops")))
    assert main(["report"]) == 3
    assert capsys.readouterr().err == "error: internal error: ZeroDivisionError: oops, rerun with --debug\n"


@pytest.mark.parametrize("arguments", [["--debug", "report"], ["report", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, arguments: list[str]
) -> None:
    """With --debug, before or after the command, the traceback comes first; the exit code stays."""
    monkeypatch.setattr("specbench.cli.report.run_folder", raising(UsageError("wrong")))
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.endswith("error: wrong\n")


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), typer.Abort()])
def test_an_interrupt_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, problem: BaseException
) -> None:
    """Ctrl-C ends with 130 and says how to go on."""
    monkeypatch.setattr("specbench.cli.report.run_folder", raising(problem))
    assert main(["report"]) == 130
    assert capsys.readouterr().err == "interrupted; where results are stored, the same command goes on\n"


def test_a_command_chooses_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """`typer.Exit(1)` in a command is the exit code of the process."""
    monkeypatch.setattr("specbench.cli.report.run_folder", raising(typer.Exit(1)))
    assert main(["report"]) == 1


def test_as_a_process(tmp_path: Path) -> None:
    """`python -m specbench` passes the exit code on and keeps stdout for results."""
    command = [sys.executable, "-m", "specbench"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options: dict[str, Any] = {
        "cwd": tmp_path,
        "env": environment,
        "capture_output": True,
        "text": True,
        "timeout": 60,
        "check": False,
    }
    wrong = subprocess.run([*command, "report"], **options)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: no run in results/ yet\n\nhint: ")
    fine = subprocess.run([*command, "report", str(GOLDEN / "run"), "--width", "100"], **options)
    assert (fine.returncode, fine.stderr) == (0, "")
    assert fine.stdout == (GOLDEN / "terminal-100.txt").read_text(encoding="utf-8")


# ---- Help -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_ends_with_two_examples(command: str, capsys: Captured) -> None:
    """Each command's help is at most 50 lines of 80 columns and closes with two runnable examples."""
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert len(lines) <= 50
    assert all(len(line) <= 80 for line in lines[:-2])  # an example stays on one line
    assert lines[-3].strip() == "Examples:"
    for line in lines[-2:]:
        assert shlex.split(line)[:2] == ["specbench", command]


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples name options and arguments the command has."""
    stem = command.replace("-", "_")
    module = sys.modules.get(f"specbench.cli.{stem}") or sys.modules[f"specbench.cli.{stem}_"]
    click_command = typer.main.get_command(app)
    for example in module.EXAMPLES:
        words = shlex.split(example)[1:]
        context = click_command.make_context("specbench", list(words))
        name, found, rest = click_command.resolve_command(context, words)  # type: ignore[attr-defined]
        found.make_context(name, rest)


def test_help_is_quick() -> None:
    """`specbench --help` takes less than half a second of processor time."""
    before = os.times()
    subprocess.run(
        [sys.executable, "-m", "specbench", "--help"], cwd=ROOT, capture_output=True, timeout=60, check=True
    )
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 0.5


def test_version(capsys: Captured) -> None:
    """--version prints the version and nothing else."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"specbench {specbench.__version__}\n"


def test_nothing_asked_shows_the_help(capsys: Captured) -> None:
    """Without a command the help goes to stderr, and the call counts as wrong usage."""
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Commands:" in captured.err


# ---- report -----------------------------------------------------------------------------------------


def put_run(folder: Path, run_id: str, age_s: float) -> Path:
    """Copy the hand-made run to results/, last written `age_s` seconds ago."""
    target = folder / "results" / run_id
    shutil.copytree(GOLDEN / "run", target)
    when = time.time() - age_s
    os.utime(target / "run.json", (when, when))
    return target


def change(run: Path, text: str, new: str) -> None:
    """Replace the first occurrence of a text in a run.json, which keeps its age."""
    path = run / "run.json"
    before = path.stat().st_mtime
    content = path.read_text(encoding="utf-8")
    assert text in content
    path.write_text(content.replace(text, new, 1), encoding="utf-8")
    os.utime(path, (before, before))


@pytest.mark.parametrize("name", ["latest", "new", "results/new", "results/new/run.json"])
def test_ways_to_name_a_run(name: str, in_empty_folder: Path, capsys: Captured) -> None:
    """A run is named by `latest`, its id, its folder or its run.json; stderr says what `latest` is."""
    put_run(in_empty_folder, "old", 100)
    put_run(in_empty_folder, "new", 50)
    assert _runs.run_folder(name) == Path("results/new")
    assert capsys.readouterr().err == ("latest is results/new\n" if name == "latest" else "")


COMPLETE, LOCAL = '"status": "complete"', '"engine": "local"'


@pytest.mark.parametrize(
    ("text", "new"),
    [(COMPLETE, '"status": "running"'), (LOCAL, '"engine": "simulated"'), ("{", "")],
    ids=["incomplete", "simulated", "unreadable"],
)
def test_latest_is_a_complete_run_of_a_model(
    text: str, new: str, in_empty_folder: Path, capsys: Captured
) -> None:
    """`latest` passes over newer runs that are incomplete, simulated or unreadable, and says so."""
    put_run(in_empty_folder, "old", 100)
    put_run(in_empty_folder, "good", 70)
    change(put_run(in_empty_folder, "new", 50), text, new)
    assert _runs.run_folder("latest") == Path("results/good")
    assert capsys.readouterr().err == "latest is results/good (newer ones are incomplete or simulated)\n"


def test_latest_falls_back(in_empty_folder: Path, capsys: Captured) -> None:
    """Without a complete run of a model `latest` is the newest there is, with a note of one line."""
    change(put_run(in_empty_folder, "old", 100), COMPLETE, '"status": "interrupted"')
    change(put_run(in_empty_folder, "new", 50), LOCAL, '"engine": "simulated"')
    assert _runs.run_folder("latest") == Path("results/new")
    assert capsys.readouterr().err == (
        "latest is results/new (simulated; results/ holds no complete run of a model)\n"
    )


def test_a_near_miss_of_a_run_is_suggested(in_empty_folder: Path) -> None:
    """A misspelt run id names the one that was meant."""
    put_run(in_empty_folder, "monday", 0)
    with pytest.raises(UsageError, match="did you mean 'monday'"):
        _runs.run_folder("mondya")


def test_a_folder_without_a_run(capsys: Captured, in_empty_folder: Path) -> None:
    """A folder that is no run is an error of one line."""
    assert main(["report", "."]) == 2
    assert_error(capsys.readouterr(), "no run in .", "latest")


@pytest.mark.parametrize("options", [["--json"], ["--format", "json"]])
def test_report_as_json(options: list[str], capsys: Captured) -> None:
    """JSON on stdout is one document."""
    assert main(["report", str(GOLDEN / "run"), *options]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == "sample"


def test_report_to_a_file(tmp_path: Path, capsys: Captured) -> None:
    """--output writes the file and leaves stdout empty."""
    target = tmp_path / "report.md"
    assert main(["report", str(GOLDEN / "run"), "--format", "markdown", "--output", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert target.read_text(encoding="utf-8") == (GOLDEN / "report.md").read_text(encoding="utf-8")


def test_report_to_a_place_that_cannot_be_written(tmp_path: Path, capsys: Captured) -> None:
    """An output file in a folder that is not there is an error of one line."""
    assert main(["report", str(GOLDEN / "run"), "--output", str(tmp_path / "none" / "x.md")]) == 2
    assert_error(capsys.readouterr(), "cannot write")


class Terminal:
    """A stdout that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "expected"), [(None, True), ("1", False)])
def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch, no_color: str | None, expected: bool) -> None:
    """On a terminal the report is coloured unless NO_COLOR is set."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", no_color)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["report", str(GOLDEN / "run")]) == 0
    assert ("\x1b[" in terminal.text) is expected


# ---- list and explain -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(list_.KINDS))
def test_every_kind_can_be_listed(kind: str, capsys: Captured) -> None:
    """Each kind lists its names, also as JSON; what does not exist yet lists nothing."""
    assert main(["list", kind, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert main(["list", kind]) == 0
    text = capsys.readouterr().out
    for entry in entries:
        assert set(entry) - {"class"} == {"name", "options", "summary"}
        assert ("class" in entry) is (kind == "faults")
        assert entry["name"] in text


def test_listing_shows_options_with_defaults(tmp_path: Path) -> None:
    """A module's options, their defaults and its first sentence are read from its text."""
    path = tmp_path / "odd_one.py"
    path.write_text(
        '"""Does odd\nthings.\n\nMore."""\nimport nowhere\n'
        "class Options:\n    k: int = 4\n    best_of: int\n    fast: bool = True\n    mode: str = 'x'\n",
        encoding="utf-8",
    )
    entry = list_._described("odd-one", path)
    assert (entry.options, entry.summary) == ("k=4,best-of=…,fast=true,mode=x", "Does odd things.")


def test_every_metric_can_be_explained(capsys: Captured) -> None:
    """`explain` knows each metric by its key and prints its formula."""
    for key, definition in DEFINITIONS.items():
        assert main(["explain", key]) == 0
        assert definition.formula in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 100])
def test_explanations_fit_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Notes and the words of others are wrapped beside their heads, and no word of them is lost."""
    monkeypatch.setenv("COLUMNS", str(width))
    for key, definition in DEFINITIONS.items():
        assert main(["explain", key]) == 0
        text = capsys.readouterr().out
        lines = [line for line in text.splitlines() if not line.startswith("  formula")]
        assert max(map(len, lines)) <= width
        for words in (definition.note, *definition.elsewhere.values()):
            assert words in " ".join(text.split())


def test_explain_says_what_others_call_it(capsys: Captured) -> None:
    """Other tools' definitions are printed, by label as well as by key, and as JSON."""
    assert main(["explain", "draft acceptance rate"]) == 0
    assert "vLLM" in capsys.readouterr().out
    assert main(["explain", "ttft", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["key"] == "ttft"


def test_commands_are_registered_in_order() -> None:
    """`run` and `report` lead the list of commands; each file of the package is one."""
    files = {p.stem.rstrip("_").replace("_", "-") for p in Path(cli.__file__).parent.glob("[!_]*.py")}
    assert set(COMMANDS) == files
    listed = [info.name for info in app.registered_commands]
    first = [name for name in ("run", "report") if name in listed]
    assert listed[: len(first)] == first


# ---- Progress ---------------------------------------------------------------------------------------


def test_progress_off_a_terminal_is_a_line_a_stage_and_a_tenth(capsys: Captured) -> None:
    """Piped, each stage has a line, and each tenth of its work one with what was done and the time."""
    with RichProgress() as progress:
        progress.stage("loading a model with a name so long that eighty columns would not hold all of [it]")
        progress.advance()
        progress.stage("measuring", total=40)
        for _ in range(10):
            progress.advance(0, "a label that is for bars only")
            progress.advance(4)
        progress.stage("auditing", total=3)
        for _ in range(3):
            progress.advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("all of [it]")
    assert lines[1] == "measuring"
    assert lines[2:12] == [f"measuring: {10 * i} % ({4 * i} of 40), 0:00" for i in range(1, 11)]
    assert [line.partition(",")[0] for line in lines[12:]] == [
        "auditing",
        "auditing: 33 % (1 of 3)",
        "auditing: 66 % (2 of 3)",
        "auditing: 100 % (3 of 3)",
    ]


def test_progress_of_many_small_parts_is_ten_lines(capsys: Captured) -> None:
    """A thousand parts give ten lines; the time is that since the stage began."""
    with RichProgress() as progress:
        progress.stage("measuring", total=1000)
        progress.started -= 3725
        for _ in range(1000):
            progress.advance()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "measuring: 100 % (1000 of 1000), 1:02:05"
