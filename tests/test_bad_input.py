"""Parameters, grammars and rules that cannot be used: one line, exit code 2, and nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbench.bench.config import RunConfig
from specbench.bench.run import run
from specbench.cli import main
from specbench.errors import UsageError

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, *rows: dict[str, Any]) -> str:
    """Write prompts as JSON Lines and return the file's name."""
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


def assert_nothing_written() -> None:
    """Check that no run was begun."""
    assert not list(Path().glob("results/*/*"))


def assert_refused(capsys: Captured, code: int, *words: str) -> None:
    """Check that a command ended with exit code 2 and one line that holds these words."""
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, captured.err
    assert "Traceback" not in captured.err
    for word in words:
        assert word in captured.err
    assert_nothing_written()


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('json:{"type": "strin"}', ["grammars.jsonl, line 2: the grammar 'json:'", "Invalid type: strin"]),
        ('json:{"type": "object"', ["line 2", "invalid JSON"]),
        ('json:{"not": {}}', ["Unimplemented keys"]),
        ("regex:(", ["line 2: the grammar 'regex:'", "unclosed group"]),
        ("regex:a(?=b)", ["look-around"]),
        ("choice:[]", ["there is nothing to choose from", "hint: write the texts as a JSON list"]),
        ("jsn:{}", ["did you mean 'json'?"]),
        ({"type": "object"}, ["'grammar' must be a string, not an object"]),
    ],
)
def test_a_grammar_that_cannot_be_read(grammar: Any, words: list[str], capsys: Captured) -> None:
    """A schema, expression or list that is wrong is told with file and line, before a model is loaded."""
    file = write("grammars.jsonl", {"prompt": "a"}, {"prompt": "b", "grammar": grammar})
    assert_refused(capsys, main(["run", "--target", "nowhere/at/all", "--workload", file]), *words)


@pytest.mark.parametrize(
    ("grammar", "what"),
    [
        (r"regex:[^\x00-\x{10ffff}]", "prompt 'second' of 'grammars': the grammar"),
        ('json:{"type": "integer", "minimum": 5, "maximum": 3}', "line 2: the grammar 'json:'"),
        ('json:{"enum": []}', "Unsatisfiable schema"),
    ],
)
def test_a_grammar_that_cannot_be_satisfied(grammar: str, what: str, capsys: Captured) -> None:
    """A grammar that permits no text, or none of the model's tokens, is refused by prompt or line."""
    file = write("grammars.jsonl", {"prompt": "a"}, {"id": "second", "prompt": "b", "grammar": grammar})
    assert_refused(capsys, main(["run", "--models", "tiny", "--workload", file]), what)


def test_a_tokenizer_that_no_grammar_can_read(saved_model: Path, capsys: Captured) -> None:
    """A word-level tokenizer does not say which bytes its tokens are."""
    file = write("grammars.jsonl", {"id": "only", "prompt": "a", "grammar": "regex:a+"})
    words = ["run", "--target", str(saved_model / "target"), "--workload", file, "--strategy", "ngram:k=2"]
    assert_refused(capsys, main(words), "grammars cannot be used with this tokenizer", "hint: ")


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("draft:topk=2,verify=block", ["verify=block judges chains", "use rejection or exact"]),
        ("draft:topk=2,verify=typical", ["verify=typical judges chains"]),
        ("suffix:nodes=8,verify=typical", ["verify=typical judges chains", "use rejection or exact"]),
        ("suffix:nodes=8,verify=block", ["verify=block judges chains"]),
        ("suffix:corpus=yes", ["expected verify=exact"]),
        ("draft:k=4,verify=blok", ["did you mean 'block'"]),
        ("draft:topk=4,depth=5", ["give nodes=N"]),
        ("draft:depth=3", ["add topk=2"]),
        ("draft:topk=2,policy=confidence", ["a tree's shape is fixed before it is drawn"]),
        (
            "draft:policy=emma",
            ["no policy 'emma'; did you mean 'ema'?", "hint: known: confidence, ema, fixed"],
        ),
        ("draft:policy=ema(alhpa=.2)", ["no option 'alhpa'; did you mean 'alpha'?"]),
        ("draft:policy=ema(alpha=2)", ["alpha=2.0; expected above 0 and at most 1"]),
        ("draft:policy=ema(tiers=8:1-3)", ["says nothing of batch size 1"]),
        ("draft:policy=ema(", ["policy"]),
        ("ngram:policy=confidence(threshold=0)", ["threshold=0.0; expected above 0"]),
    ],
)
def test_rules_trees_and_policies_that_do_not_go_together(
    strategy: str, words: list[str], capsys: Captured
) -> None:
    """What the strategy cannot do is refused before a model is loaded."""
    assert_refused(capsys, main(["run", "--target", "nowhere/at/all", "--strategy", strategy]), *words)


def test_more_samples_than_rows() -> None:
    """The samples of a prompt are decoded together, so there must be rows for them."""
    with pytest.raises(UsageError, match="--samples 9 of a prompt are decoded together, and --rows is 8"):
        RunConfig("x", samples=9, rows=8)
    with pytest.raises(UsageError, match="--samples is 0; expected 1 or more"):
        RunConfig("x", samples=0)


class Silent:
    """Progress that is told to nobody."""

    def stage(self, text: str, total: int | None = None) -> None:
        """Begin."""

    def advance(self, amount: int = 1, text: str | None = None) -> None:
        """Go on."""

    def say(self, text: str) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("sampling", "what"),
    [
        ("ignore_eos=true", "ignore_eos is True; expected False beside a grammar"),
        ("min_new_tokens=2", "min_new_tokens is 2; expected 0 beside a grammar"),
        ('logit_bias={"999999": 1}', "--sampling names token 999999; tiny has"),
        ("stop_token_ids=[888888]", "--sampling names token 888888; tiny has"),
        (r"grammar=regex:[^\x00-\x{10ffff}]", "cannot write any text of it"),
    ],
)
def test_parameters_that_do_not_fit_prompts_or_model(sampling: str, what: str) -> None:
    """What only prompts and model can tell is found before there is a run folder."""
    file = write("p.jsonl", {"prompt": "a"}, {"prompt": "b", "grammar": "regex:[0-9]+"})
    config = RunConfig("tiny", strategies=("ngram:k=2",), workloads=(file,), sampling=(sampling,))
    with pytest.raises(UsageError) as caught:
        run(config, Path("results"), Silent(), run_id=None, fresh=False)
    assert what in caught.value.message
    assert "\n" not in caught.value.message
    assert_nothing_written()
