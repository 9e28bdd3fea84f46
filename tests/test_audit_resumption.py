"""An audit that was interrupted within a strategy goes on as if it had not been."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from specbench import environment, registry
from specbench.audit import continuations, regimes, session
from specbench.audit.budget import Budget, Control
from specbench.audit.self_test import Bench, Case, Job, cases
from specbench.audit.verdicts import AuditRecord
from specbench.bench import audit
from specbench.bench.audit import AuditConfig, AuditDocument, Underway
from specbench.errors import UsageError
from specbench.records import derived_seed
from tests.test_audit_command import Silent

TOKENS, BATCH = 2_400, 8
CONTROLS = (Control("accept-all", True, True), Control("A/A", False, False))


class Interrupted(Exception):
    """Stands for Ctrl-C."""


@pytest.fixture(scope="module")
def bench() -> Bench:
    """One toy engine for all."""
    return Bench()


def subject_of(bench: Bench, case: Case) -> session.Subject:
    """Return a small audit of a case."""
    subject = bench.subject(Job(case, seed=3))
    return replace(subject, budget=Budget("test", TOKENS, 1.0), batch=BATCH)


def vars_of(record: AuditRecord) -> dict[str, Any]:
    """Return the fields of a record but the clock's."""
    return {name: getattr(record, name) for name in AuditRecord.__slots__ if name != "seconds"}


@pytest.mark.parametrize("name", ["draft:k=3", "draft:topk=2,depth=3", "draft:k=3,verify=block"])
def test_interrupted_and_continued_gives_the_same_record(bench: Bench, name: str) -> None:
    """With the seed kept (which only a test does), stopping after any batch changes nothing."""
    case = cases([name])[0]

    def audited(**options: Any) -> AuditRecord:
        return session.audit(subject_of(bench, case), name, controls=CONTROLS, sequences_only=True, **options)

    whole = audited()
    for batches in (1, 5):
        kept: list[dict[str, Any]] = []

        def save(state: Callable[[], dict[str, Any]], kept: list[dict[str, Any]] = kept) -> None:
            kept.append(json.loads(json.dumps(state())))
            if len(kept) == batches:  # noqa: B023
                raise Interrupted

        with pytest.raises(Interrupted):
            audited(save=save)
        assert 0 < session.tokens_in(kept[-1]) < whole.tokens
        assert vars_of(audited(saved=kept[-1])) == vars_of(whole)


def test_a_fault_is_caught_across_an_interruption(bench: Bench) -> None:
    """Evidence from before it counts, and the worst position may lie there."""
    case = cases(["residual-from-p"])[0]
    kept: list[dict[str, Any]] = []

    def save(state: Callable[[], dict[str, Any]]) -> None:
        kept.append(json.loads(json.dumps(state())))
        raise Interrupted

    alter = registry.module("fault", "residual-from-p").alter
    asked: dict[str, Any] = {"alter": alter, "controls": CONTROLS, "sequences_only": True}
    subject = replace(subject_of(bench, case), batch=4)  # too few to alarm
    with pytest.raises(Interrupted):
        session.audit(subject, case.strategy, save=save, **asked)
    other = replace(subject, seed=77, budget=Budget("test", 20_000, 1.0))
    record = session.audit(other, case.strategy, saved=kept[0], **asked)
    assert record.verdict == "FAIL"
    assert record.tokens > session.tokens_in(kept[0])


def test_the_command_goes_on_within_a_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was scored before Ctrl-C is not drawn again, and other seeds are used after it."""
    config = AuditConfig("tiny", "tiny-draft", strategies=("ngram:k=4",), tokens=400)
    original = Underway.save
    saved: list[str] = []
    states: list[dict[str, Any]] = []

    def stopping(self: Underway, strategy: str, state: Callable[[], dict[str, Any]]) -> None:
        self.every_s = 0.0
        original(self, strategy, state)
        saved.append(strategy)
        states.append(state())
        if strategy != "ordinary" and saved.count(strategy) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Underway, "save", stopping)
    monkeypatch.setattr(continuations, "branch_prompts", lambda _: [])  # what comes after the sequences
    with pytest.raises(KeyboardInterrupt):
        audit.run(config, tmp_path, Silent(), run_id="one", fresh=False)
    kept = json.loads((tmp_path / "one" / "underway.json").read_text())
    seeds = {tuple(entry[:2]): entry[2] for entry in kept["state"]["outputs"]}
    assert kept["strategy"] == "ngram:k=4"
    said: list[str] = []

    class Telling(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    document = audit.run(config, tmp_path, Telling(), run_id="one", fresh=False)
    assert any(f"goes on after {session.tokens_in(kept['state'])} tokens" in line for line in said)
    assert document.status == "complete"
    assert not (tmp_path / "one" / "underway.json").exists()
    ended = {tuple(entry[:2]): entry[2] for entry in states[-1]["outputs"]}
    assert len(ended) == len(set(ended.values()))  # no random number was used twice
    assert {place: ended[place] for place in seeds} == seeds
    streams = {name: place for place, name in enumerate(["own", *sorted(regimes.ACCEPTANCE)])}
    later = ended.keys() - seeds.keys()
    assert later
    # The first attempt would have gone on with these; a part of them it had perhaps read.
    assert all(ended[place] != derived_seed(config.seed, streams[place[0]], place[1]) for place in later)
    assert all(seeds[place] == derived_seed(config.seed, streams[place[0]], place[1]) for place in seeds)
    assert {record.strategy for record in document.records} == {"ordinary", "ngram:k=4"}


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [("versions", {"transformers": "5.0"}, "transformers 5.0"), ("models", [], "other models")],
)
def test_other_software_is_refused(tmp_path: Path, part: str, value: Any, said: str) -> None:
    """One line, never a verdict made of two halves."""
    config = AuditConfig("tiny", "tiny-draft", strategies=("ngram:k=4",), tokens=50)
    around = json.loads(json.dumps(environment.fingerprint()))
    around[part] = {**around[part], **value} if isinstance(value, dict) else value
    asked = {**json.loads(json.dumps(asdict(config))), "attempts": 0}
    AuditDocument(tmp_path / "one", asked, around, "interrupted", ()).write()
    with pytest.raises(UsageError, match=f"begun with {said}"):
        audit.run(config, tmp_path, Silent(), run_id="one", fresh=False)
    assert AuditDocument.open(tmp_path / "one").status == "interrupted"


def test_a_damaged_state_says_what_to_do(tmp_path: Path) -> None:
    """Torn JSON is one line and a way out."""
    (tmp_path / "underway.json").write_text('{"kind": "audit st')
    with pytest.raises(UsageError, match="not readable JSON") as problem:
        Underway(tmp_path).load("ngram:k=4")
    assert "to begin this strategy again" in str(problem.value.hint)
