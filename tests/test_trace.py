"""`specbench trace`: the rounds of a stored request as trees, from known records and from a real run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specbench.bench.store import RunStore
from specbench.cli import main
from specbench.records import CellKey, RequestRecord, RoundRecord, SamplingParams, Serving

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")  # no line is cut off all the same


def write(strategy: str, output: tuple[int, ...], *rounds: RoundRecord, load: str = "c=1") -> None:
    """Store one request of a cell in results/run; its prompt has two tokens, its prefill emits the first."""
    store = RunStore.create(Path("results/run"), {"engine": "local"}, {})
    request = RequestRecord(
        0, "p1", (1, 1), output, SamplingParams(temperature=0.0), 0.0, 0.0, (), (), 1.0, "eos"
    )
    prefill = RoundRecord(0, 0, 0, 0, 0, 0, False, 1, "none")
    key = CellKey("w", 0.0, load, strategy)
    store.write_serving(Serving(key, 0, 0, (), (prefill, *rounds), (request,), 1.0))


CHAIN = (
    RoundRecord(1, 0, 1, 3, 3, 1, True, 2, "none", (5, 6, 7), (0.9, 0.5, 0.25), None),
    RoundRecord(2, 0, 2, 1, 1, 1, False, 2, "none", (2,), (1.0,), None),
    RoundRecord(3, 0, 3, 0, 0, 0, False, 1, "none", (), (), None),
    # EOS is the second of three accepted tokens: what stands behind it was never emitted.
    RoundRecord(4, 0, 4, 3, 3, 3, False, 2, "eos", (4, 0, 3), (0.5, 0.125, 0.5), None),
)
OUTPUT = (9, 5, 8, 2, 3, 6, 4, 0)
#            5 (6 7)   8
#            └ then 8 below 6 instead; 5 again as a sibling of 4
TREE = RoundRecord(
    1, 0, 1, 5, 3, 2, True, 3, "none", (5, 4, 6, 7, 8), (0.5, 0.25, 0.5, 0.125, 1.0), (-1, -1, 0, 0, 2)
)


def drawn(capsys: Captured) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_chain(capsys: Captured) -> None:
    """Each round shows what was kept, what was not, and what came out: recovered, bonus or undrafted."""
    write("ngram:k=3", OUTPUT, *CHAIN)
    assert main(["trace", "run"]) == 0
    assert drawn(capsys) == [
        "w T=0 c=1 ngram:k=3: prompt p1, 8 tokens",
        "├── prefill of 2 tokens → 9",
        "├── round 1 at token 1: drafted 3 tokens, accepted 1, emitted 2",
        "│   ├── ✓ 5 q=0.9",
        "│   │   └── ✗ 6 q=0.5",
        "│   │       └── ✗ 7 q=0.25",
        "│   └── → recovered 8",
        "├── round 2 at token 3: drafted 1 token, accepted 1, emitted 2",
        "│   ├── ✓ 2 q=1",
        "│   └── → bonus 3",
        "├── round 3 at token 5: drafted 0 tokens, accepted 0, emitted 1",
        "│   └── → no draft: 6",
        "└── round 4 at token 6: drafted 3 tokens, accepted 3, emitted 2",
        "    ├── ✓ 4 q=0.5",
        "    │   └── ✓ 0 q=0.125",
        "    │       └── ✗ 3 q=0.5",
        "    └── ended by eos",
    ]


def test_only_the_first_rounds(capsys: Captured) -> None:
    """--rounds counts from the first after the prefill."""
    write("ngram:k=3", OUTPUT, *CHAIN)
    assert main(["trace", "run", "--rounds", "2"]) == 0
    lines = drawn(capsys)
    assert [line[4:11] for line in lines if "round " in line] == ["round 1", "round 2"]


def test_a_tree(capsys: Captured) -> None:
    """Siblings stand beside one another; only the path that the output took is kept."""
    write("draft:topk=2,depth=3", (9, 5, 7, 3), TREE)
    assert main(["trace", "run"]) == 0
    assert drawn(capsys)[2:] == [
        "└── round 1 at token 1: drafted 5 tokens, depth 3, accepted 2, emitted 3",
        "    ├── ✓ 5 q=0.5",
        "    │   ├── ✗ 6 q=0.5",
        "    │   │   └── ✗ 8 q=1",
        "    │   └── ✓ 7 q=0.125",
        "    ├── ✗ 4 q=0.25",
        "    └── → recovered 3",
    ]


def test_json(capsys: Captured) -> None:
    """--json is one document with the records as they were stored."""
    write("draft:topk=2,depth=3", (9, 5, 7, 3), TREE)
    assert main(["trace", "run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cell"] == "w T=0 c=1 draft:topk=2,depth=3"
    assert document["request"]["output_tokens"] == [9, 5, 7, 3]
    assert [entry["round"] for entry in document["rounds"]] == [0, 1]
    assert document["rounds"][1]["draft_parents"] == [-1, -1, 0, 0, 2]
    assert document["rounds"][1]["accepted"] == 2


def test_the_first_that_drafts_is_drawn(capsys: Captured) -> None:
    """Without --strategy ordinary decoding is passed over; with it, it is drawn."""
    write("ordinary", (9, 0), RoundRecord(1, 0, 1, 0, 0, 0, False, 1, "eos", (), (), None))
    write("ngram:k=3", OUTPUT, *CHAIN)
    assert main(["trace", "run"]) == 0
    assert drawn(capsys)[0].startswith("w T=0 c=1 ngram:k=3")
    assert main(["trace", "run", "--strategy", "ordinary"]) == 0
    assert drawn(capsys)[2:] == [
        "└── round 1 at token 1: drafted 0 tokens, accepted 0, emitted 1",
        "    ├── → no draft: 0",
        "    └── ended by eos",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategy", "ngram:k=4"], "this run has no strategy 'ngram:k=4'; did you mean 'ngram:k=3'?"),
        (["--workload", "v"], "this run has no workload 'v'"),
        (["--temperature", "1"], "this run has no temperature '1.0'"),
        (["--prompt", "2"], "--prompt 2: this cell has 1 request"),
        (["--prompt", "0"], "--prompt: expected 1 or more"),
    ],
)
def test_what_the_run_does_not_have(words: list[str], message: str, capsys: Captured) -> None:
    """Exit code 2, one line, and what there is."""
    write("ngram:k=3", OUTPUT, *CHAIN)
    assert main(["trace", "run", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert "\n\nhint: " in captured.err


def test_requests_served_together_are_not_recorded(capsys: Captured) -> None:
    """Without a load c=1 there is nothing to draw: exit code 3, and the way out."""
    write("ngram:k=3", OUTPUT, *CHAIN, load="c=2")
    assert main(["trace", "run"]) == 3
    assert "it has no load c=1\n\nhint: run again with --load c=1" in capsys.readouterr().err


def test_a_run_without_its_drafts(capsys: Captured) -> None:
    """Rounds that drafted but kept no tokens cannot be drawn."""
    write("ngram:k=3", (9, 5, 8), RoundRecord(1, 0, 1, 3, 3, 1, True, 2, "none"))
    assert main(["trace", "run"]) == 3
    assert "without its draft tokens" in capsys.readouterr().err


def test_a_simulated_run(capsys: Captured) -> None:
    """A simulation has no tokens, and running it again would bring none."""
    Path("p.jsonl").write_text('{"prompt": "abc"}\n')
    words = ["--engine", "simulated", "--workload", "p.jsonl", "--load", "c=1", "--run-id", "run"]
    assert main(["run", *words, "--strategy", "draft:k=2", "--max-new-tokens", "5"]) == 0
    capsys.readouterr()
    assert main(["trace", "run"]) == 3
    assert "simulated" in capsys.readouterr().err


@pytest.mark.parametrize("spec", ["ngram:k=3,min=1", "draft:k=3", "draft:topk=2,depth=2"])
def test_a_run_of_a_model(spec: str, saved_model: Path, capsys: Captured) -> None:
    """The kept nodes and the tokens after them, read in order, are the output's text."""
    Path("p.jsonl").write_text('{"prompt": "abcabcab"}\n{"prompt": "efgefgef"}\n')
    pair = ["--target", str(saved_model / "target"), "--draft", str(saved_model / "draft"), "--no-audit"]
    words = ["--workload", "p.jsonl", "--load", "c=1", "--temperature", "1", "--run-id", "run"]
    assert main(["run", *pair, *words, "--strategy", spec, "--max-new-tokens", "14"]) == 0
    capsys.readouterr()
    assert main(["trace", "run", "--strategy", spec, "--prompt", "2", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)["request"]["output_tokens"]
    assert main(["trace", "run", "--strategy", spec, "--prompt", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    shown = re.findall(r"(?:✓|→(?: recovered| bonus| no draft:)?) '(.*?)'", captured.out)
    assert len(shown) == len(output)
    if spec.startswith("draft"):
        assert "✓" in captured.out
