"""What the tool of error rates makes of what it measured: bounds, promises, and where it stops."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import audit_error_rates
import numpy as np
import pytest
import torch
from error_rates import document, e_process, normalisers, p_values, runtime
from error_rates.logs import Log

from specbench.audit import self_test, toy
from specbench.audit.alternatives import Alternatives
from specbench.audit.budget import Budget
from specbench.errors import UsageError

ROOT = Path(__file__).parents[1]
ALPHA = 1.5e-4
SMALL = e_process.Setup(budget=600, alpha=1e-3, vocab=16, seed=0)


def audit(
    log_supremum: float = 0.0, *, log_e_value: float = -1.0, alarm: int | None = None
) -> dict[str, Any]:
    """Return an audit as it stands in the log."""
    return {
        "tokens": 600,
        "tokens_at_alarm": alarm,
        "log_supremum": log_supremum,
        "log_e_value": log_e_value,
        "best": "draft-mix:0.3",
        "regime": "bad",
    }


def sight(ratio: float | None, growth: float = 0.0) -> e_process.Sight:
    """Return a fault of some smallest detectable effects."""
    smallest = None if ratio is None else 0.01
    return e_process.Sight(0.01 * (ratio or 1), "draft-mix:0.3", "draft-mix", growth, smallest)


def tool(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> int:
    """Run the tool in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["audit_error_rates.py", "--out", str(out), *arguments])
    with pytest.raises(SystemExit) as stopped:
        audit_error_rates.main()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def found_by(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the tool on tiny models; return its exit code and its document."""
    small = ["--budget", "600", "--alpha", "1e-3", "--vocab", "16"]
    code = tool(monkeypatch, out, *small, *arguments)
    document: dict[str, Any] = json.loads((out / "error_rates.json").read_text())
    return code, document


def write_log(out: Path, case: str, audits: Sequence[Mapping[str, Any]]) -> None:
    """Begin a log of the tiny set-up with some audits of a case."""
    Log(out / "error_rates.audits.jsonl", SMALL.plain(), "audits").add(case, audits)


# The log


def test_a_log_goes_on_where_it_was(tmp_path: Path) -> None:
    """Batches add up over runs, and a line that a killed run left torn is dropped."""
    path = tmp_path / "log.jsonl"
    log = Log(path, {"seed": 0}, "audits")
    log.add("a", [1, 2])
    log.add("b", [3])
    with path.open("a") as file:
        file.write('{"case": "a", "aud')
    again = Log(path, {"seed": 0}, "audits")
    assert again.done == {"a": [1, 2], "b": [3]}
    again.add("b", [4])
    assert Log(path, {"seed": 0}, "audits").done == {"a": [1, 2], "b": [3, 4]}


def test_a_log_of_another_set_up_is_refused(tmp_path: Path) -> None:
    """What was drawn otherwise is not added to; what is no log is said to be none."""
    path = tmp_path / "log.jsonl"
    Log(path, {"seed": 0}, "audits")
    with pytest.raises(UsageError, match="was made with"):
        Log(path, {"seed": 1}, "audits")
    path.write_text('{"seed": 0}\nnot json\n')
    with pytest.raises(UsageError, match="is no log of this tool"):
        Log(path, {"seed": 0}, "audits")


def test_the_case_furthest_behind_is_next(tmp_path: Path) -> None:
    """An early stop leaves every case with about the same share; nothing is next when all is done."""
    log = Log(tmp_path / "log.jsonl", {}, "audits")
    log.add("a", [0] * 5)
    log.add("b", [0] * 30)
    assert log.furthest_behind({"a": 10, "b": 100}) == "b"
    assert log.furthest_behind({"a": 10, "b": 40, "c": 1, "d": 0}) == "c"
    assert log.furthest_behind({"a": 5, "b": 30, "d": 0}) is None


# Lossless rules


@pytest.mark.parametrize(("alarms", "holds"), [(31, True), (32, False)])
def test_of_20000_audits_31_may_reach_a_thousand(alarms: int, holds: bool) -> None:
    """The bound at 1e-3 is the .99 Poisson quantile, counted from suprema below the bar of the audit."""
    audits = [audit(7.0)] * alarms + [audit()] * (20_000 - alarms)
    row = e_process.summary_of_rule(audits, ALPHA)
    own, run = row["levels"]
    assert (own["level"], own["alarms"], run["level"], run["alarms"]) == (ALPHA, 0, 1e-3, alarms)
    assert run["bound"] == 31
    assert run["expected_at_most"] == pytest.approx(20)
    assert (run["holds"], row["holds"]) == (holds, holds)


def test_alarms_at_the_deployed_level_are_counted_from_the_stops() -> None:
    """An audit that stopped at its alarm counts at both levels; 3 expected audits allow 8, not 9."""
    audits = [audit(9.0, alarm=500)] * 9 + [audit()] * 19_991
    own, run = e_process.summary_of_rule(audits, ALPHA)["levels"]
    assert (own["alarms"], own["bound"], own["holds"]) == (9, 8, False)
    assert (run["alarms"], run["holds"]) == (9, True)


@pytest.mark.parametrize(("reached", "holds"), [(50, True), (51, False)])
def test_evidence_reaches_20_in_one_of_20_at_most(reached: int, holds: bool) -> None:
    """The share is held to Ville's bound itself."""
    row = e_process.summary_of_rule([audit(3.0)] * reached + [audit()] * (1000 - reached), ALPHA)
    assert row["share_reaching_20"] == reached / 1000
    assert (row["share_reaching_20_holds"], row["holds"]) == (holds, holds)


def test_a_mean_e_value_above_1_is_told_from_bad_luck() -> None:
    """One lucky audit of a thousand lifts the mean within its error; a bias of all does not pass."""
    lucky = e_process.summary_of_rule([audit(log_e_value=math.log(2000))] + [audit()] * 999, ALPHA)
    assert lucky["mean_e_value"] > 2
    assert lucky["mean_e_value_holds"]
    audits = [audit(log_e_value=math.log(value)) for value in (1.0, 1.2)] * 500
    biased = e_process.summary_of_rule(audits, ALPHA)
    assert biased["mean_e_value"] == pytest.approx(1.1)
    assert biased["mean_e_value_error"] == pytest.approx(0.1 / math.sqrt(1000), rel=1e-2)
    assert not biased["holds"]


def test_rules_hold_only_when_all_were_measured_in_full() -> None:
    """Good figures of few audits are not enough; bad ones are bad at once."""
    few = {f"rule:{rule}": [audit()] * 100 for rule in toy.RULES}
    assert e_process.summary_of_rules(few, ALPHA)["holds"] is None
    assert e_process.summary_of_rules({}, ALPHA)["holds"] is None
    full = {case: audits * 40 for case, audits in few.items()}
    found = e_process.summary_of_rules(full, ALPHA)
    assert found["holds"] is True
    assert found["all"]["audits"] == 28_000
    del full["rule:tree"]
    assert e_process.summary_of_rules(full, ALPHA)["holds"] is None
    few["rule:tree"] = [audit(9.0, alarm=10)] * 100
    assert e_process.summary_of_rules(few, ALPHA)["holds"] is False


# Faults


@pytest.mark.parametrize(
    ("caught", "audits", "kept"),
    [
        (100, 100, True), (99, 100, True), (98, 100, None), (97, 100, None), (96, 100, False),
        (396, 400, True), (395, 400, False), (20, 20, None), (0, 20, None),
    ],
)  # fmt: skip
def test_a_promise_is_kept_by_99_of_100(caught: int, audits: int, kept: bool | None) -> None:
    """97 and 98 leave it open until there are 400 audits; fewer than 100 say nothing."""
    assert e_process.kept_promise(caught, audits) is kept


@pytest.mark.parametrize(
    ("missed", "promised", "needed"),
    [(0, True, 100), (1, True, 100), (2, True, 400), (3, True, 400), (4, True, 100), (3, False, 100)],
)
def test_only_a_promise_in_doubt_takes_more_audits(missed: int, promised: bool, needed: int) -> None:
    """A fault that need not be found is not measured further, nor one that was clearly found or missed."""
    audits = [audit(alarm=300)] * (100 - missed) + [audit()] * missed
    assert e_process.audits_needed(audits, promised, 100) == needed


def test_a_promise_applies_from_twice_the_smallest_effect_on() -> None:
    """In any one regime or in all together; a direction in which nothing can be found promises nothing."""
    audits = [audit(alarm=300)] * 100
    fault = toy.FAULTS["residual-p"]
    for ratios, promised in (((1.9, 1.9), False), ((2.0, 0.1), True), ((0.1, 3.0), True), ((None, 1), False)):
        seen = {"bad": sight(ratios[0]), "all": sight(ratios[1])}
        row = e_process.summary_of_fault(audits, fault, seen, 14.0)
        assert row["promised"] is promised
        assert row["promise_kept"] is (True if promised else None)


def test_tokens_are_measured_where_most_audits_found_the_fault_and_estimated_elsewhere() -> None:
    """The estimate is what the fastest stream needs to reach the bar."""
    fault = toy.FAULTS["residual-p"]
    seen = {"bad": sight(1.0, growth=1e-5), "all": sight(0.5, growth=1e-4)}
    found = [audit(alarm=at) for at in (100, 200, 300)]
    row = e_process.summary_of_fault([*found, audit()], fault, seen, 14.0)
    assert (row["median_tokens"], row["estimated_tokens"], row["caught"]) == (200, None, 3)
    row = e_process.summary_of_fault([*found, *[audit()] * 4], fault, seen, 14.0)
    assert (row["median_tokens"], row["estimated_tokens"]) == (None, 140_000)
    blind = {"all": replace(sight(0.5), alternative=None, direction=None)}
    row = e_process.summary_of_fault([audit()], fault, blind, 14.0)
    assert (row["median_tokens"], row["estimated_tokens"]) == (None, None)


def test_distances_are_those_of_the_emitted_law() -> None:
    """A decoder that uses another temperature emits that law, whose distance is known; no fault has none."""
    setup = replace(SMALL, budget=6000)
    pairs = setup.pairs()
    planned = e_process.instrument(pairs, setup)
    fault = toy.FAULTS["temperature"]
    seen = e_process.sights(pairs, fault, planned, 0)
    assert fault.used is not None
    for name, pair in pairs.items():
        halves = e_process._counts(pair, fault, 0)
        visits = (halves[0] + halves[1]).sum(1)
        exact = float((np.abs(fault.used(pair.p) - pair.p).sum(1) / 2) @ visits / visits.sum())
        assert 0.9 * exact < seen[name].tv < 1.05 * exact
        assert seen[name].direction == "temper-hot"
    assert seen["all"].tv == pytest.approx(np.mean([seen[name].tv for name in pairs]))
    innocent = e_process.sights(pairs, toy.NO_FAULT, planned, 0)
    assert all(abs(look.tv) < 0.003 and not look.is_promised for look in innocent.values())


def test_a_fault_is_promised_where_it_shows() -> None:
    """Accepting everything is no fault under a perfect draft, and a large one under a bad draft."""
    pairs = SMALL.pairs()
    seen = e_process.sights(pairs, toy.FAULTS["accept-all"], e_process.instrument(pairs, SMALL), 0)
    assert not seen["self"].is_promised
    assert seen["bad"].is_promised
    assert seen["bad"].direction == "draft-mix"
    assert seen["all"].is_promised


# P-values


def test_the_law_of_toy_continuations_is_whole() -> None:
    """Branches that are not followed keep all their mass: pooled by prefix, both tables agree."""
    pair = toy.ToyPair.make(4, contexts=16)
    whole = p_values.law_of(pair, (0, 2), 4, 1, 0.0)
    cut = p_values.law_of(pair, (0, 2), 4, 1, 0.02)
    assert not whole.truncated
    assert cut.truncated
    for key, mass in cut.continuations.items():
        below = sum(share for text, share in whole.continuations.items() if text[: len(key)] == key)
        assert mass == pytest.approx(below)


@pytest.mark.parametrize("kind", p_values.KINDS)
def test_a_batch_of_p_values_depends_on_its_number_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batch again is the same; the next is another; all lie in (0, 1]."""
    monkeypatch.setattr(p_values, "BATCH", 12)
    first, again, following = (p_values.batch_of(kind, batch, 0) for batch in (0, 0, 1))
    assert first == again != following
    assert len(first) == 12
    assert all(0 < p <= 1 for p in first + following)


@pytest.mark.parametrize(("power", "holds"), [(1.0, True), (1.2, False), (0.5, True)])
def test_p_values_that_are_small_too_often_are_told(power: float, holds: bool) -> None:
    """Uniform ones pass, liberal ones do not; those small too seldom pass, and are seen in the share."""
    uniform = (np.arange(4000) + 0.5) / 4000
    found = p_values.summary({kind: list(uniform**power) for kind in p_values.KINDS})
    assert found["holds"] is holds
    at = found["kinds"]["chi-squared"]["levels"][0]
    assert at["level"] == 0.05
    assert at["share"] == pytest.approx(0.05 ** (1 / power), abs=1e-3)
    assert bool(at["share"] < at["least_if_uniform"]) == (power < 1)


def test_few_p_values_hold_nothing() -> None:
    """All kinds must be there, with 4,000 each."""
    uniform = [(i + 0.5) / 3999 for i in range(3999)]
    assert p_values.summary(dict.fromkeys(p_values.KINDS, uniform))["holds"] is None
    assert p_values.summary({})["holds"] is None


# Through the runtime


@pytest.mark.parametrize("audits", [0, 5, 11, 100])
def test_audits_are_shared_out_over_the_innocent(audits: int) -> None:
    """The shares add up, and differ by one at most."""
    shares = runtime.wanted(audits)
    assert sum(shares.values()) == audits
    assert list(shares) == list(self_test.INNOCENT)
    assert max(shares.values()) - min(shares.values()) <= 1


def test_a_runtime_audit_lists_its_components(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one of an n-gram drafter runs every part and alarms in none; its seed is its own."""
    monkeypatch.setattr(runtime, "BUDGET", Budget("tiny", 300, 1.0, continuation_tv=0.3))
    found = runtime.audit(self_test.Bench(), "ngram:k=3,min=1", 2, 0)
    assert {"e-process", "chi-squared", "contracts", "acceptance", "collisions"} <= set(found["components"])
    assert found["alarms"] == []
    assert found["tokens"] >= 300
    assert found["seed"] == 2 * 11 + 8


def test_one_alarm_in_a_hundred_runtime_audits_is_one_too_many() -> None:
    """And fewer than a hundred without are not enough."""
    quiet = {"tokens": 9, "components": ["e-process", "support"], "alarms": []}
    loud = {**quiet, "alarms": ["support"]}
    assert runtime.summary({"draft": [quiet] * 99})["holds"] is None
    assert runtime.summary({"draft": [quiet] * 60, "ngram": [quiet] * 40})["holds"] is True
    found = runtime.summary({"draft": [quiet] * 99, "ngram": [loud]})
    assert found["holds"] is False
    assert (found["audits"], found["alarms"], found["variants"]["ngram"]["alarms"]) == (100, 1, 1)
    assert found["components"] == {
        "e-process": {"audits": 100, "alarms": 0},
        "support": {"audits": 100, "alarms": 1},
    }


# Normalisers


def test_every_token_of_an_audit_is_looked_at() -> None:
    """All alternatives are laws there, to rounding, and are what the audit bet on."""
    found = normalisers.audit(self_test.Bench(), "toy", 250, 0)
    assert found["tokens"] >= 250
    assert found["laws"] == found["tokens"] * found["alternatives"]
    assert found["holds"]
    assert found["smallest"] > 0
    assert max(found["sum_error"], found["factor_error"]) < 1e-12


def test_a_normaliser_that_is_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A law that sums to 1 + 2e-6, one below 0, and a factor of another law each break the claim."""
    usable = Alternatives(has_draft=False)
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).expand(4, 3)
    tokens = torch.tensor([0, 1, 2, 0])
    scores = usable.score(p, tokens)

    def seen(factors: Any = scores.log_factors) -> normalisers.Worst:
        worst = normalisers.Worst()
        worst.look(usable, p, tokens, None, replace(scores, log_factors=factors))
        return worst

    assert seen().holds
    assert seen().laws == 4 * len(usable.names)
    assert not seen(scores.log_factors + 2e-6).holds
    law = Alternatives.law
    for change in (torch.tensor([2e-6, 0, 0]), torch.tensor([1.0, 0.0, -1.0])):
        monkeypatch.setattr(Alternatives, "law", lambda *a, change=change, **k: law(*a, **k) + change)
        assert not seen(np.zeros_like(scores.log_factors)).holds
        worst = seen()
        assert worst.sum_error > 1e-6 or worst.smallest < 0


# The tool


def test_the_tool_resumes_and_writes_both_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Error rates are measured in batches that add up, and another set-up is refused."""
    arguments = ["--parts", "e-process", "--rules", "block", "--faults", "accept-all", "--fault-audits", "20"]
    code, found = found_by(monkeypatch, tmp_path, *arguments, "--audits", "20")
    page = capsys.readouterr().out
    assert code == 0
    assert "| block | 20 |" in page
    assert "| accept-all | accept test |" in page
    assert "| 20/20 |" in page
    code, found = found_by(monkeypatch, tmp_path, *arguments, "--audits", "40")
    said = capsys.readouterr()
    assert "| block | 40 |" in said.out
    assert said.err.splitlines() == ["rule:block: 40 of 40"]
    assert found["rules"]["rules"]["block"]["audits"] == 40
    assert found["holds"] is None
    assert (tmp_path / "error_rates.md").read_text().strip() == said.out.strip()
    code, _ = found_by(monkeypatch, tmp_path, *arguments, "--seed", "1")
    assert code == 2
    assert "hint: give the same options, or another --out" in capsys.readouterr().err


def test_the_tool_runs_as_a_script(tmp_path: Path) -> None:
    """It finds its own parts from anywhere, and writes both documents where it is told."""
    script = ROOT / "tools" / "audit_error_rates.py"
    run = subprocess.run(
        [sys.executable, str(script), "--parts", "none", "--out", "rates"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "rates" / "error_rates.md").read_text().strip() == run.stdout.strip()
    assert json.loads((tmp_path / "rates" / "error_rates.json").read_text())["holds"] is None


def test_a_broken_promise_is_an_exit_code_of_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large fault that was missed in 4 of 100 audits breaks the claim, in words too."""
    write_log(tmp_path, "fault:accept-all", [audit(alarm=100)] * 96 + [audit()] * 4)
    code, found = found_by(monkeypatch, tmp_path, "--parts", "none")
    assert code == 1
    assert found["faults"]["faults"]["accept-all"]["promise_kept"] is False
    assert (found["holds"], found["faults"]["holds"], found["rules"]["holds"]) == (False, False, None)
    page = (tmp_path / "error_rates.md").read_text()
    assert "| yes, BROKEN | 96/100 | 100 |" in page
    assert f"| {document.HEADLINES['faults']} | NO |" in page
    assert f"| {document.HEADLINES['runtime']} | not yet measured in full |" in page


def test_a_promise_in_doubt_is_settled_by_400_audits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool goes on by itself, from the batches after those done."""
    write_log(tmp_path, "fault:accept-all", [audit(alarm=100)] * 98 + [audit()] * 2)
    arguments = ["--parts", "e-process", "--rules", "none", "--faults", "accept-all"]
    code, found = found_by(monkeypatch, tmp_path, *arguments)
    row = found["faults"]["faults"]["accept-all"]
    assert (row["audits"], row["promise_kept"], code) == (400, True, 0)
    assert 396 <= row["caught"] <= 398


def test_a_rule_that_alarms_is_an_exit_code_of_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three alarms in twenty audits are no chance."""
    write_log(tmp_path, "rule:tree", [audit(8.0, alarm=100)] * 3 + [audit()] * 17)
    code, found = found_by(monkeypatch, tmp_path, "--parts", "none")
    assert code == 1
    assert found["rules"]["rules"]["tree"]["holds"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--faults", "acept-all", "--parts", "e-process"], "did you mean 'accept-all'"),
        (["--parts", "p-value"], "did you mean 'p-values'"),
        (["--alpha", "2"], "expected a number between 0 and 1"),
        (["--audits", "-1"], "--audits is -1; expected 0 or more"),
        (["--budget", "0"], "expected 1 or more"),
    ],
)
def test_bad_options_are_refused_in_words(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line of what is wrong, exit code 2, and no document."""
    assert tool(monkeypatch, tmp_path, *arguments) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "error_rates.json").exists()


def test_the_page_shows_every_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other parts logged is summarised without measuring again."""
    seed = 0
    values = Log(tmp_path / "error_rates.p_values.jsonl", p_values.setup(seed), "p_values")
    for kind in p_values.KINDS:
        values.add(kind, [(i + 0.5) / 4000 for i in range(4000)])
    audits = Log(tmp_path / "error_rates.runtime.jsonl", runtime.setup(seed), "audits")
    audits.add("ordinary", [{"tokens": 15_000, "components": ["e-process"], "alarms": []}] * 100)
    laws = Log(tmp_path / "error_rates.normalisers.jsonl", normalisers.setup(seed), "audits")
    for model in normalisers.TOKENS:
        row = {"vocab": 48, "tokens": 10, "alternatives": 40, "laws": 400, "smallest": 1e-9}
        laws.add(model, [{**row, "sum_error": 1e-15, "factor_error": 1e-15, "holds": True}])
    code, found = found_by(monkeypatch, tmp_path, "--parts", "none")
    assert code == 0
    assert [found[name]["holds"] for name in ("p_values", "runtime", "normalisers")] == [True] * 3
    assert found["holds"] is None  # nothing was audited on toy models
    page = (tmp_path / "error_rates.md").read_text()
    assert page.count("| yes |") == 3 + 2 * len(p_values.KINDS) + 2
    assert "100 audits, 0 with an alarm, 0.1 expected at most" in page
