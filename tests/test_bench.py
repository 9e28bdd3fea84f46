"""`specbench run`, from command line to run folder: simulated with exact figures, and on a tiny model."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbench.audit import continuations
from specbench.bench.store import RunStore
from specbench.cli import main
from specbench.engines.local import LocalEngine
from specbench.engines.simulated import SimulatedEngine

Captured = pytest.CaptureFixture[str]
ENGINE = "simulated:target_ms=8,draft_ms=1,verify_ms=9"
"""An ordinary step of 8 ms; three drafted tokens and their verification take 3 + 9 ms."""


@pytest.fixture(autouse=True)
def fixed_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are 100 columns wide, whatever terminal or test runner this is."""
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder with a file of nine prompts of 17 tokens."""
    monkeypatch.chdir(tmp_path)
    write_prompts("prompts.jsonl", 9, 17)
    write_prompts("one.jsonl", 1, 17)
    return tmp_path


def write_prompts(name: str, num: int, max_new_tokens: int) -> None:
    texts = ["abcabcabcab", "d", "efghefghef", "ijklmn", "oooooo", "pqrpqr", "stust", "ba", "cdcdcd"]
    rows = [
        {"id": f"p{i}", "prompt": text, "max_new_tokens": max_new_tokens}
        for i, text in enumerate(texts[:num])
    ]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def simulate(*words: str, engine: str = ENGINE, workload: str = "prompts.jsonl") -> int:
    """Run a simulated benchmark at concurrency 1, greedily, unless told otherwise."""
    options = list(words)
    for name, value in (("--strategy", "draft:k=3"), ("--load", "c=1"), ("--temperature", "1")):
        if name not in options:
            options += [name, value]
    return main(["run", "--engine", engine, "--workload", workload, *options])


def folders() -> list[Path]:
    """Return the run folders, oldest first."""
    return sorted(path for path in Path("results").iterdir() if path.is_dir())


def document() -> dict[str, Any]:
    """Return the run.json of the only run there is."""
    (folder,) = folders()
    loaded: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return loaded


def cell(run: dict[str, Any], strategy: str, load: str = "c=1") -> dict[str, Any]:
    """Return the summary of one strategy."""
    (found,) = [c for c in run["cells"] if (c["key"]["strategy"], c["key"]["load"]) == (strategy, load)]
    assert isinstance(found, dict)
    return found


# Exact figures


def test_everything_accepted_in_json(capsys: Captured) -> None:
    """At alpha 1: 4 tokens in 12 ms against 8 ms each, 3 ms per token, a speedup of 8/3, break-even 1.5."""
    assert simulate("--format", "json", engine=ENGINE + ",alpha=1") == 0
    run = json.loads(capsys.readouterr().out)
    assert run["status"] == "complete"
    ordinary, draft = cell(run, "ordinary"), cell(run, "draft:k=3")
    assert ordinary["tpot"]["mean"] == pytest.approx(0.008)
    assert ordinary["tokens_per_target_step"] == 1.0
    assert ordinary["requests"] == 9
    assert ordinary["output_tokens"] == 9 * 17
    expected = {
        "tokens_per_target_step": 4.0,
        "acceptance_length": 4.0,
        "draft_acceptance_rate": 1.0,
        "alpha": 1.0,
        "joint_acceptance": [1.0, 1.0, 1.0],
        "decode_rounds": 9 * 4,
        "drafted": 9 * 12,
        "accepted": 9 * 12,
        "emitted": 9 * 16,
        "step_s": 0.012,
        "draft_s": 0.003,
        "verify_s": 0.009,
        "round_cost_ratio": 1.5,
        "break_even_tokens_per_step": 1.5,
        "headroom": 4 / 1.5 - 1,
    }
    for name, value in expected.items():
        assert draft[name] == pytest.approx(value), name
    assert draft["tpot"]["mean"] == pytest.approx(0.003)
    assert draft["ttft"]["mean"] == pytest.approx(0.008)
    assert draft["itl"]["mean"] == pytest.approx(0.012)
    assert draft["e2e"]["mean"] == pytest.approx(0.008 + 4 * 0.012)
    assert draft["decode_speedup"]["value"] == pytest.approx(8 / 3)
    assert draft["decode_speedup"]["num"] == 9
    assert draft["output_throughput"] == pytest.approx(17 / 0.056)
    assert cell(run, "ordinary#2")["decode_speedup"]["value"] == pytest.approx(1.0)
    assert any("SIMULATED" in banner for banner in run["banners"])


def test_the_worked_example_of_the_metrics(capsys: Captured) -> None:
    """Ordinary 8 ms, draft 3 and verify 9: 3.2 tokens per step are 3.75 ms per token, 2.13x."""
    # With this seed the five rounds accept 3, 3, 0, 2 and 3 draft tokens, so that 16 tokens take 5 steps.
    assert simulate("--seed", "28", engine=ENGINE + ",alpha=0.8", workload="one.jsonl") == 0
    text = capsys.readouterr().out
    draft = cell(document(), "draft:k=3")
    assert draft["tokens_per_target_step"] == pytest.approx(3.2)
    assert draft["tpot"]["mean"] == pytest.approx(0.00375)
    assert draft["decode_speedup"]["value"] == pytest.approx(8 / 3.75)
    assert draft["break_even_tokens_per_step"] == pytest.approx(1.5)
    lines = [line.split() for line in text.splitlines() if line.startswith("draft:k=3")]
    predicted = 3.2 / (1 + 3 / 8)  # verification taken for an ordinary step
    assert lines[0][2:] == ["2.13†", f"{predicted:.2f}", "3.20", "1.50", "0.73"]
    assert lines[1][2:] == ["3.20", "3.00", "9.00", "0", "1.50", "–"]
    assert lines[2][5] == "3.75/3.75"
    assert "one, T=1: no verdict: draft:k=3 (2.13x†)" in text


def test_nothing_accepted_is_slower(capsys: Captured) -> None:
    """At alpha 0 a full step yields one token in 12 ms: tokens per step 1, below break-even, slower."""
    assert simulate("--format", "json", engine=ENGINE + ",alpha=0") == 0
    draft = cell(json.loads(capsys.readouterr().out), "draft:k=3")
    assert draft["tokens_per_target_step"] == 1.0
    assert draft["draft_acceptance_rate"] == 0.0
    # The last three steps have room for 2, 1 and no draft tokens: 11, 10 and 8 ms.
    total = 0.001 * (13 * 12 + 11 + 10 + 8)
    assert draft["tpot"]["mean"] == pytest.approx(total / 16)
    assert draft["decode_speedup"]["value"] == pytest.approx(16 * 0.008 / total)
    assert draft["headroom"] < 0


def test_throughput_at_a_closed_load(capsys: Captured) -> None:
    """Three clients share each step, so that output grows threefold while a token takes as long."""
    assert simulate("--load", "c=1", "--load", "c=3", "--format", "json", engine=ENGINE + ",alpha=1") == 0
    run = json.loads(capsys.readouterr().out)
    for strategy in ("ordinary", "draft:k=3"):
        one, three = cell(run, strategy), cell(run, strategy, "c=3")
        assert three["output_throughput"] == pytest.approx(3 * one["output_throughput"])
        assert three["tpot"]["mean"] == pytest.approx(one["tpot"]["mean"])
        assert three["mean_batch"] == 3.0


def test_an_open_load_is_a_share_of_what_was_measured(capsys: Captured) -> None:
    """`poisson=0.5` offers half the requests per second that ordinary decoding served at its closed load."""
    assert simulate("--load", "poisson=0.5", "--load", "c=1", "--format", "json") == 0
    run = json.loads(capsys.readouterr().out)
    (folder,) = folders()
    arrivals: dict[str, list[float]] = {}
    for cell_records in RunStore.open(folder).cells():
        if cell_records.key.load == "poisson=0.5":
            arrivals[cell_records.key.strategy] = sorted(
                request.arrival for serving in cell_records.servings for request in serving.requests
            )
    assert arrivals["ordinary"] == arrivals["draft:k=3"] == arrivals["ordinary#2"]
    capacity = 1 / (17 * 0.008)
    rate = len(arrivals["ordinary"]) / arrivals["ordinary"][-1]
    assert 0.2 * capacity < rate < 1.2 * capacity  # nine gaps are a noisy mean
    assert {c["key"]["load"] for c in run["cells"]} == {"c=1", "poisson=0.5"}


def test_repeats_are_kept_apart(capsys: Captured) -> None:
    """Two repeats give every prompt two sets of records, under other seeds, paired in the speedup."""
    assert simulate("--repeats", "2", "--format", "json", "--limit", "5") == 0
    draft = cell(json.loads(capsys.readouterr().out), "draft:k=3")
    assert draft["requests"] == 10
    assert draft["decode_speedup"]["num"] == 5


# The run folder


def test_what_a_run_leaves_behind(capsys: Captured) -> None:
    """A folder with run.json and three tables and nothing else; stdout has the report, stderr the folder."""
    assert simulate("--run-id", "mine") == 0
    captured = capsys.readouterr()
    assert sorted(path.name for path in Path("results/mine").iterdir()) == [
        "requests.parquet",
        "rounds.parquet",
        "run.json",
        "steps.parquet",
    ]
    run = document()
    assert run["run_id"] == "mine"
    assert run["config"]["strategies"] == ["ordinary", "ordinary#2", "draft:k=3"]
    assert run["config"]["workloads"]["prompts"]["prompts"] == 9
    assert run["audits"] == []
    assert captured.out.startswith("specbench run mine")
    assert "Output distribution: not checked" in captured.out
    assert "stored in results/mine" in captured.err
    assert "error" not in captured.err
    records = RunStore.open(Path("results/mine")).cells()
    assert {len([r for s in c.servings for r in s.requests]) for c in records} == {9}
    assert main(["report", "mine"]) == 0
    assert capsys.readouterr().out == captured.out


def test_a_workload_with_grammars_is_measured_without_them_too(capsys: Captured) -> None:
    """Its header asks for it: two blocks of one run, and a line that compares acceptance and verification."""
    rows = [{"id": f"p{i}", "prompt": "abc", "grammar": "regex:[0-9]+"} for i in range(2)]
    Path("bound.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    header = "prompts: bound.jsonl\nmax_new_tokens: 9\nwithout_grammar: true\n"
    Path("bound.yaml").write_text(header, encoding="utf-8")
    assert simulate(workload="bound.yaml") == 0
    told = capsys.readouterr().out
    run = document()
    assert {c["key"]["workload"] for c in run["cells"]} == {"bound", "bound-free"}
    assert run["config"]["workloads"]["bound-free"]["twin_of"] == "bound"
    assert "twin_of" not in run["config"]["workloads"]["bound"]
    assert "bound c=1, T=1, with grammars against without: ordinary (verify" in " ".join(told.split())
    records = {str(c.key): c for c in RunStore.open(folders()[0]).cells()}
    for name, grammar in (("bound", "regex:[0-9]+"), ("bound-free", None)):
        (serving,) = records[f"{name} T=1 c=1 ordinary"].servings
        assert [request.sampling.grammar for request in serving.requests] == [grammar] * 2


class Interrupting:
    """Presses Ctrl-C while the engine serves for the nth time, after its first events."""

    def __init__(self, engine: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.at: int | None = None
        original = engine.serve

        def serve(this: Any, schedule: Any) -> Iterator[Any]:
            self.calls += 1
            if self.calls == self.at:
                events = iter(original(this, schedule))
                next(events)
                raise KeyboardInterrupt
            return original(this, schedule)  # type: ignore[no-any-return]

        monkeypatch.setattr(engine, "serve", serve)


def outcome_of(run: dict[str, Any]) -> dict[str, Any]:
    """Return what must not depend on whether a run was interrupted."""
    return {key: run[key] for key in ("status", "config", "cells", "audits")}


@pytest.mark.parametrize("at", [1, 2, 6, 10, 12])
def test_an_interrupted_run_is_resumed(at: int, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Ctrl-C exits 130; the same command continues in the same folder and measures only what is missing."""
    assert simulate() == 0
    whole = document()
    shutil.rmtree("results")

    engine = Interrupting(SimulatedEngine, monkeypatch)
    engine.at = at
    assert simulate() == 130
    assert "interrupted" in capsys.readouterr().err.splitlines()[-1]
    assert document()["status"] == "interrupted"
    (folder,) = folders()
    written = len(list((folder / "parts").glob("*.requests.parquet")))
    assert not list(folder.glob("*.parquet"))

    engine.at, engine.calls = None, 0
    assert simulate() == 0
    assert f"resuming {folder}" in capsys.readouterr().err
    assert outcome_of(document()) == outcome_of(whole)
    # Nine servings (three units, three strategies) and a warm-up for each strategy that serves again.
    assert 9 - written <= engine.calls <= 9 - written + 3
    cells = RunStore.open(folder).cells()
    assert {c.key.strategy for c in cells} == {"ordinary", "ordinary#2", "draft:k=3"}
    for records in cells:
        prompts = [request.prompt_id for serving in records.servings for request in serving.requests]
        assert sorted(prompts) == [f"p{i}" for i in range(9)]


def test_another_question_is_another_run(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Another configuration does not continue an interrupted run, nor does --fresh; the same one does."""
    engine = Interrupting(SimulatedEngine, monkeypatch)
    engine.at = 5
    assert simulate("--run-id", "a") == 130
    (first,) = folders()
    engine.at = None
    assert simulate("--seed", "7", "--run-id", "b") == 0
    assert len(folders()) == 2
    assert simulate("--seed", "8", "--run-id", "a") == 2
    assert "another configuration" in capsys.readouterr().err
    assert simulate("--run-id", "a", "--fresh") == 2
    assert "--run-id" in capsys.readouterr().err
    assert simulate("--run-id", "a") == 0
    assert json.loads((first / "run.json").read_text(encoding="utf-8"))["status"] == "complete"


def test_changed_prompts_are_another_question(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """If the prompt file changed in between, an interrupted run is not continued with other prompts."""
    engine = Interrupting(SimulatedEngine, monkeypatch)
    engine.at = 5
    assert simulate() == 130
    (first,) = folders()
    engine.at = None
    write_prompts("prompts.jsonl", 8, 17)
    time.sleep(1.1)  # a folder's name holds the second it was made in
    assert simulate() == 0
    assert f"run {folders()[1]}" in capsys.readouterr().err
    assert json.loads((first / "run.json").read_text(encoding="utf-8"))["status"] == "interrupted"


# Errors


def assert_refused(capsys: Captured, code: int, *words: str) -> None:
    """Check that a command was refused in one line with these words, and left no run behind."""
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, captured.err
    assert "Traceback" not in captured.err
    for word in words:
        assert word in captured.err
    assert not Path("results").is_dir() or not folders()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--strategy", "drft:k=3"], ["no strategy 'drft'", "did you mean 'draft'"]),
        (["--strategy", "draft:kk=3"], ["no option 'kk'", "k, verify"]),
        (
            ["--strategy", "draft:k=three"],
            ["k=three is not a whole number", "hint: the defaults are draft:k=4"],
        ),
        (["--strategy", "draft:k=0"], ["at least 1", "hint: the defaults are draft:k=4,verify=rejection"]),
        (["--strategy", "draft:verify=exakt"], ["did you mean 'exact'", "hint: for example draft:verify="]),
        (["--strategy", "draft:k"], ["expected key=value"]),
        (["--workload", "predictible"], ["no workload 'predictible'", "did you mean 'predictable'"]),
        (["--workload", "nowhere.jsonl"], ["no such file"]),
        (["--workload", "prompts.jsonl"], ["two workloads are called 'prompts'"]),
        (["--load", "x=1"], ["no load 'x=1'", "c=8"]),
        (["--load", "c=0"], ["at least 1"]),
        (["--load", "c=1", "--load", "rate=fast"], ["expected a number"]),
        (["--load", "poisson=0.7"], ["no closed load is run", "c=8"]),
        (["--temperature", "-0.5"], ["temperature is negative"]),
        (["--temperature", "nan"], ["temperature is negative or no number"]),
        (["--output", "one.jsonl"], ["cannot write to one.jsonl"]),
        (["--output", "one.jsonl/inside"], ["cannot write to one.jsonl/inside"]),
        (["--inject", "accept-al"], ["no fault 'accept-al'", "did you mean 'accept-all'"]),
        (["--engine", "simulatd"], ["no engine 'simulatd'", "did you mean 'simulated'"]),
        (["--engine", "simulated:alpha=2"], ["alpha=2", "hint: the defaults are simulated:target_ms=8.0"]),
        (["--engine", "simulated:alpha=high"], ["alpha=high is not a number"]),
        (["--dtype", "float31"], ["no dtype 'float31'", "hint: --dtype takes"]),
        (["--audit-dtype", "float31"], ["no dtype 'float31'", "hint: --audit-dtype takes"]),
        (["--audit-dtype", "bfloat16"], ["judged in float32 only", "hint: add --audit-budget quick"]),
        (["--engine", "simulated:beta=2"], ["no option 'beta'"]),
        (["--format", "xml"], ["no format 'xml'", "markdown"]),
        (["--limit", "0"], ["--limit"]),
        (["--repeats", "0"], ["--repeats"]),
        (["--models", "smollm2", "--target", "x"], ["both name the target"]),
        (["--strategie", "draft"], ["no option '--strategie'", "did you mean '--strategy'"]),
    ],
)
def test_what_cannot_be_run_is_refused(options: list[str], words: list[str], capsys: Captured) -> None:
    """A wrong name, value or combination exits 2 with one line and a way out, before anything is measured."""
    target = [] if "--models" in options else ["--target", "x"]
    assert_refused(capsys, simulate(*options, *target), *words)


def test_unknown_bundled_models(capsys: Captured) -> None:
    """A bundled set that does not exist is answered with the near miss and the way to one's own model."""
    assert_refused(
        capsys, main(["run", "--models", "smolm2"]), "no bundled models", "did you mean 'smollm2'", "--target"
    )


# A tiny model


@pytest.fixture
def short_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for a TV distance of .1 instead of .05, with a quarter of the draws."""
    monkeypatch.setattr(continuations, "DETECTABLE_TV", 0.1)


def measure(models: Path, *words: str, draft: bool = False) -> int:
    """Run the tiny saved model in process."""
    options = ["run", "--target", str(models / "target"), "--dtype", "float32", "--workload", "prompts.jsonl"]
    if draft:
        options += ["--draft", str(models / "draft")]
    return main([*options, *words])


STRATEGIES = ("--strategy", "ngram:k=2", "--strategy", "early-exit:layers=1,k=2")
SHORT = ("--limit", "5", "--max-new-tokens", "7")


@pytest.mark.usefixtures("short_audit")
def test_a_run_from_end_to_end(saved_model: Path, capsys: Captured) -> None:
    """A model on disk is measured at two loads and two temperatures and audited; no strategy fails."""
    code = measure(
        saved_model, *STRATEGIES, "--strategy", "draft:k=2", *SHORT, "--temperature", "0",
        "--temperature", "1", "--load", "c=2", "--load", "poisson=0.8", draft=True,
    )  # fmt: skip
    captured = capsys.readouterr()
    assert code == 0, captured.err
    run = document()
    assert run["status"] == "complete"
    strategies = ["ordinary", "ordinary#2", "ngram:k=2", "early-exit:layers=1,k=2", "draft:k=2"]
    assert run["config"]["strategies"] == strategies
    assert run["config"]["models"]["target"]["dtype"] == "float32"
    keys = [(c["key"]["strategy"], c["key"]["load"], c["key"]["temperature"]) for c in run["cells"]]
    assert sorted(keys) == sorted(
        (s, load, t) for s in strategies for load in ("c=2", "poisson=0.8") for t in (0.0, 1.0)
    )
    verdicts = {audit["strategy"]: audit["verdict"] for audit in run["audits"]}
    assert list(verdicts) == [s for s in strategies if s != "ordinary#2"]
    assert set(verdicts.values()) <= {"PASS", "INCONCLUSIVE"}
    assert verdicts["ordinary"] == verdicts["draft:k=2"] == "PASS"
    for audit in run["audits"]:
        assert audit["dtype"] == "float32"
        assert audit["out_of_support"] == 0
        assert audit["injected"] is None

    records = {str(c.key): c for c in RunStore.open(folders()[0]).cells()}
    for load in ("c=2", "poisson=0.8"):
        outputs = {
            strategy: {
                request.prompt_id: request.output_tokens
                for serving in records[f"prompts T=0 {load} {strategy}"].servings
                for request in serving.requests
            }
            for strategy in strategies
        }
        assert all(found == outputs["ordinary"] for found in outputs.values())
        assert len(outputs["ordinary"]) == 5
    for strategy in strategies[2:]:
        assert strategy in captured.out
    assert "audit: is it still the target's distribution?" in captured.out
    for summary in run["cells"]:
        assert summary["failures"] == 0
        assert summary["peak_memory"] > 0


@pytest.mark.usefixtures("short_audit")
def test_a_fault_is_caught(saved_model: Path, capsys: Captured) -> None:
    """With every draft token accepted the audit fails early exit, and the exit code is 1."""
    code = measure(
        saved_model, "--strategy", "early-exit:layers=2,k=2", *SHORT, "--temperature", "1", "--load", "c=1",
        "--inject", "accept-all",
    )  # fmt: skip
    captured = capsys.readouterr()
    assert code == 1, captured.err
    verdicts = {audit["strategy"]: audit for audit in document()["audits"]}
    assert verdicts["ordinary"]["verdict"] == "PASS"
    assert verdicts["early-exit:layers=2,k=2"]["verdict"] == "FAIL"
    assert verdicts["early-exit:layers=2,k=2"]["injected"] == "accept-all"
    assert "FAIL" in captured.out
    assert cell(document(), "early-exit:layers=2,k=2")["draft_acceptance_rate"] == 1.0


@pytest.mark.usefixtures("short_audit")
def test_an_interrupted_audit_is_resumed(
    saved_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Ctrl-C during the audit keeps the verdicts so far; the next call measures nothing again and goes on."""
    words = (*STRATEGIES, *SHORT, "--temperature", "1", "--load", "c=1")
    original = continuations.draw
    drawn: list[str] = []
    stop_at: list[str] = ["ngram:k=2"]

    def draw(engine: LocalEngine, *rest: Any, **named: Any) -> Any:
        assert engine.strategy is not None
        if engine.strategy.name in stop_at:
            raise KeyboardInterrupt
        drawn.append(engine.strategy.name)
        return original(engine, *rest, **named)

    monkeypatch.setattr(continuations, "draw", draw)
    assert measure(saved_model, *words) == 130
    assert [audit["strategy"] for audit in document()["audits"]] == ["ordinary"]
    assert document()["status"] == "interrupted"
    stop_at.clear()
    counted = Interrupting(LocalEngine, monkeypatch)
    served_by_audit = 0

    def counting(*arguments: Any, **named: Any) -> Any:
        nonlocal served_by_audit
        before = counted.calls
        result = draw(*arguments, **named)
        served_by_audit += counted.calls - before
        return result

    monkeypatch.setattr(continuations, "draw", counting)
    assert measure(saved_model, *words) == 0
    assert drawn == ["ordinary", "ngram:k=2", "early-exit:layers=1,k=2"]
    assert [audit["strategy"] for audit in document()["audits"]] == drawn
    assert counted.calls == served_by_audit
    assert "resuming" in capsys.readouterr().err


def test_a_run_without_an_audit(saved_model: Path, capsys: Captured) -> None:
    """--no-audit leaves no verdict, and the report says that nothing was checked."""
    words = ("--strategy", "ngram:k=2", *SHORT, "--temperature", "0", "--load", "c=2", "--no-audit")
    assert measure(saved_model, *words) == 0
    assert document()["audits"] == []
    assert document()["config"]["audit"] is None
    assert "not checked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--strategy", "draft:k=2"], ["needs a draft model", "--draft"]),
        (["--strategy", "early-exit:layers=9"], ["wants 9 layers; the target has 3", "at most 3"]),
        (["--dtype", "float31"], ["no dtype 'float31'", "did you mean 'float32'"]),
        (["--device", "cuda:7"], ["cuda:7"]),
        (["--workload", "long.jsonl"], ["prompt 'p0' of 'long' has 200 tokens", "is 128"]),
        (["--draft", "nowhere/at/all"], ["no model at nowhere/at/all"]),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    words: list[str], expected: list[str], saved_model: Path, capsys: Captured
) -> None:
    """A draft that is missing, too many layers, an unknown dtype or too long a prompt: one line, no run."""
    row = {"id": "p0", "prompt": "ab" * 100}
    Path("long.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    options = ["run", "--target", str(saved_model / "target"), *words]
    if "--workload" not in words:
        options += ["--workload", "prompts.jsonl"]
    if "--strategy" not in words:
        options += ["--strategy", "ngram:k=2"]
    assert_refused(capsys, main([*options, "--load", "c=1"]), *expected)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--dtype", "float31"], "--dtype takes auto, bfloat16, float16, float32"),
        (["--audit-dtype", "float31"], "--audit-dtype takes auto"),
        (["--device", "toaster"], "--device takes cpu, cuda"),
        (["--device", "cuda:99"], "use --device cpu"),
        (["--draft-device", "toaster"], "--draft-device takes cpu, cuda"),
        (["--draft-device", "cuda:99"], "use --draft-device cpu"),
    ],
)
def test_dtypes_and_devices_are_checked_before_loading(
    words: list[str], hint: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """A dtype or device that is not there is refused by its option's name before any model is looked up."""

    def unreachable(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was looked up or loaded")

    monkeypatch.setattr("specbench.models.resolve", unreachable)
    monkeypatch.setattr("specbench.models.load", unreachable)
    options = ["run", "--target", "x", "--draft", "y", "--workload", "prompts.jsonl"]
    assert_refused(capsys, main([*options, *words]), f"hint: {hint}")


def test_no_model_at_the_path(capsys: Captured) -> None:
    """A target that is not there is an error that names it."""
    assert_refused(
        capsys, main(["run", "--target", "./none", "--workload", "prompts.jsonl"]), "no model at ./none"
    )


def test_progress_counts_what_there_is_to_do() -> None:
    """Every prompt of every serving and every continuation is one unit of progress, no more and no less."""
    from specbench.bench.config import RunConfig
    from specbench.bench.run import run

    class Counter:
        def __init__(self) -> None:
            self.totals: list[tuple[str, int | None]] = []
            self.done: list[int] = []

        def stage(self, text: str, total: int | None = None) -> None:
            self.totals.append((text, total))
            self.done.append(0)

        def advance(self, amount: int = 1, text: str | None = None) -> None:
            self.done[-1] += amount

        def say(self, text: str) -> None:
            pass

    counter = Counter()
    config = RunConfig(
        target="simulated", engine=ENGINE, strategies=("draft:k=3",), workloads=("prompts.jsonl",),
        loads=("c=1", "c=2"), temperatures=(0.0, 1.0),
    )  # fmt: skip
    run(config, Path("results"), counter, run_id=None, fresh=False)
    assert counter.totals == [("measuring", 9 * 3 * 2 * 2)]
    assert counter.done == [9 * 3 * 2 * 2]
