"""Replaying: the rounds of real runs come back exactly, and wrong input is answered in one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tiny_models import CONTEXT, collect, copied, requests, shared

from specbench.bench import replay
from specbench.bench.replay import Outputs, Recorded
from specbench.bench.store import RunStore
from specbench.cli import main
from specbench.decoding.verification import ExactMatch, Proposal
from specbench.engines.local import LocalEngine
from specbench.errors import UsageError
from specbench.metrics.acceptance import tokens_per_target_step
from specbench.policies.fixed import Fixed
from specbench.records import CellKey, RequestRecord, RoundRecord, SamplingParams, Schedule, Serving
from specbench.runtime.protocols import DraftContext, DraftMemory, Strategy
from specbench.runtime.runner import ModelRunner

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "results" / "published" / "smollm2-quick"
GOLDEN = Path(__file__).parent / "golden" / "run"

Captured = pytest.CaptureFixture[str]


def facts(rounds: Sequence[RoundRecord]) -> list[Any]:
    """Return what a replay must reproduce; steps are numbered by batch in a run."""
    return [
        (r.round, r.drafted, r.draft_depth, r.accepted, r.rejected, r.emitted, r.ended_by) for r in rounds
    ]


PROMPTS = (
    (3, 1, 4, 1, 5, 9, 2, 6, 5, 3),
    (2,),
    (7, 7, 8, 9, 3, 7, 7, 8, 9, 3, 7, 7),
    (16, 0, 16),
    tuple((5 * i) % 17 for i in range(21)),
    (4,) * (CONTEXT - 9),  # ends with the context
)


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine(copied(shared("llama"), "sdpa"), eos_ids=(), rows=8, width=CONTEXT)


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", ["ngram:k=4,min=1", "suffix:k=5,factor=2", "suffix:verify=exact,max=2"])
def test_a_runs_own_outputs_give_its_own_rounds(
    engine: LocalEngine, spec: str, temperature: float, concurrency: int
) -> None:
    """What a run drafted and accepted in every round is what replaying its outputs finds.

    Also for sampled outputs: the token recovered after a rejected draft is never that draft.
    """
    engine.open(spec)
    offered = requests(PROMPTS, temperature=temperature, max_new_tokens=24)
    served = collect(engine.serve(Schedule(offered, concurrency=concurrency)))
    accepted = 0
    for key, record in served.records.items():
        measured = [entry for entry in served.rounds if entry.request == key]
        replayed = replay.walk(replay.model_free(spec), Recorded.of(record), key)
        assert facts(replayed) == facts(measured)
        accepted += sum(entry.accepted for entry in measured)
    assert accepted > 0


def test_a_corpus_is_replayed_in_the_order_of_the_outputs(engine: LocalEngine) -> None:
    """With corpus=yes, one strategy that walks the outputs in turn finds the rounds of a run at c=1."""
    spec = "suffix:k=5,corpus=yes,verify=exact"
    engine.open(spec)
    offered = requests((*PROMPTS[:4], *PROMPTS[:4]), temperature=0.0, max_new_tokens=24)
    served = collect(engine.serve(Schedule(offered, concurrency=1)))
    strategy = replay.model_free(spec)
    emitted = {False: 0, True: 0}
    for key, record in served.records.items():
        measured = [entry for entry in served.rounds if entry.request == key]
        assert facts(replay.walk(strategy, Recorded.of(record), key)) == facts(measured)
        emitted[key >= 4] += len(measured)
    assert emitted[True] < emitted[False]  # the second time the answers are known


def test_the_published_run_comes_back() -> None:
    """Every n-gram round of the published run, greedy or sampled, is found from its outputs alone.

    Only in a last round cut short by EOS may verification have kept tokens that no output shows.
    """
    strategy = replay.model_free("ngram:k=4")
    compared = 0
    for cell in RunStore.open(PUBLISHED).cells():
        if cell.key.strategy != "ngram:k=4":
            continue
        for serving in cell.servings:
            for record in serving.requests:
                measured = facts([row for row in serving.rounds if row.request == record.request])
                replayed = facts(replay.walk(strategy, Recorded.of(record), record.request))
                if record.finish_reason == "eos":
                    assert [entry[-2:] for entry in replayed] == [entry[-2:] for entry in measured]
                    replayed, measured = replayed[:-1], measured[:-1]
                assert replayed == measured
                compared += len(measured)
    assert compared > 1000


class Scripted:
    """A drafter that offers the same tree whatever was said."""

    needs_features: ClassVar[tuple[int, ...]] = ()
    shares_target_cache: ClassVar[bool] = False
    runners: Sequence[ModelRunner] = ()

    def __init__(self, tokens: list[int], parents: list[int]) -> None:
        self.tree = (tokens, parents)
        self.log: list[Any] = []

    def prefill(self, first_row: int, prompts: Any, features: Any) -> None:
        self.log.append(("prefill", first_row, prompts))

    def propose(self, context: DraftContext) -> Proposal:
        self.log.append(("propose", list(context.tokens[0]), list(context.limits), list(context.slots)))
        return Proposal.certain_trees([self.tree[0]], [self.tree[1]])

    def commit(self, accepted: Sequence[int], features: Any) -> None:
        self.log.append(("commit", list(accepted)))

    def fork(self, source: int, targets: Sequence[int]) -> None:
        raise AssertionError("a single row never moves")

    def release(self, rows: Sequence[int]) -> None:
        self.log.append(("release", list(rows)))

    def memory(self) -> DraftMemory:
        return DraftMemory()


def test_a_tree_is_walked_to_the_deepest_agreeing_node() -> None:
    """The path that agrees is accepted; it is no rejection if the path ends in a leaf or the output ends."""
    #        1 ── 2 ── 3
    #        └─── 4
    #        5
    drafter = Scripted([1, 5, 2, 4, 3], [-1, -1, 0, 0, 2])
    strategy = Strategy("scripted", drafter, ExactMatch(), Fixed(3), True, max_nodes=5)
    output = (0, 1, 4, 7, 5, 8, 9, 1, 2, 6, 1, 2)
    rounds = replay.walk(strategy, Recorded((6, 6), output, 40, "eos"))
    assert [(r.drafted, r.draft_depth, r.accepted, r.rejected, r.emitted, r.ended_by) for r in rounds] == [
        (0, 0, 0, False, 1, "none"),
        (5, 3, 2, False, 3, "none"),  # 1 4, a leaf, and the bonus 7
        (5, 3, 1, False, 2, "none"),  # 5, a leaf, and 8
        (5, 3, 0, True, 1, "none"),  # 9 is no root
        (5, 3, 2, True, 3, "none"),  # 1 2, then 6 instead of 3
        (5, 3, 2, False, 2, "eos"),  # the output ends inside the tree
    ]
    assert drafter.log[:3] == [
        ("prefill", 0, [[6, 6]]),
        ("propose", [6, 6, 0], [3], [5]),
        ("commit", [2]),
    ]
    assert drafter.log[-2:] == [("commit", [2]), ("release", [0])]


def test_ordinary_decoding_takes_a_step_a_token() -> None:
    """Without a drafter every round emits one token."""
    outputs = [Outputs("w", 0.0, (Recorded((1,), (2, 2, 2, 2), 4, "budget"),))]
    (result,) = replay.replay(outputs, ["ordinary"])
    assert (result.counts.decode_rounds, result.counts.drafted) == (3, 0)
    assert tokens_per_target_step(result.counts) == 1


def test_workloads_are_replayed_apart_and_together() -> None:
    """A memory of outputs ends with its workload; the last rows sum up the others."""
    answer = Recorded((1,), tuple(range(10, 30)), 20, "budget")
    outputs = [Outputs("a", 0.0, (answer,)), Outputs("b", 0.0, (answer,))]
    calls: list[None] = []
    results = replay.replay(
        outputs, ["suffix:corpus=yes,verify=exact", "ngram", "ngram"], lambda: calls.append(None)
    )
    assert [(r.strategy, r.workload) for r in results] == [
        (spec, workload)
        for workload in ("a", "b", None)
        for spec in ("suffix:corpus=yes,verify=exact", "ngram")
    ]
    assert [r.counts.drafted for r in results] == [0] * 6
    assert [r.counts.decode_rounds for r in results] == [19, 19, 19, 19, 38, 38]
    assert len(calls) == 4


# From runs and files


def stored(folder: Path, engine: str = "local") -> RunStore:
    """Write a run of two workloads, two temperatures, two loads, two repeats and two strategies."""
    store = RunStore.create(folder, {"engine": engine}, {})
    for workload, load, temperature, arm, repeat in (
        ("a", "c=1", 0.0, "ordinary", 0),
        ("a", "c=1", 0.0, "ngram:k=4", 0),
        ("a", "c=8", 0.0, "ordinary", 0),
        ("a", "c=1", 0.0, "ordinary", 1),
        ("a", "c=1", 1.0, "ordinary", 0),
        ("a", "c=1", 1.0, "ordinary", 1),
        ("b", "c=1", 0.0, "ordinary", 0),
    ):
        last = 8 if load == "c=8" else repeat if temperature else 0
        record = RequestRecord(
            0, "p", (1, 2, 1), (2, 1, 2, len(arm), last), SamplingParams(temperature=temperature,
            max_new_tokens=9), 0.0, 0.0, (), (), 1.0, "eos",
        )  # fmt: skip
        failed = RequestRecord(1, "q", (1,), (1,), SamplingParams(), 0.0, 0.0, (), (), 1.0, "error", "lost")
        key = CellKey(workload, temperature, load, arm)
        store.write_serving(Serving(key, repeat, 0, (), (), (record, failed), 1.0))
    store.finish()
    return store


def test_of_a_run_the_baselines_distinct_outputs_are_taken(tmp_path: Path) -> None:
    """One load, one strategy, equal repeats once, failed requests not at all."""
    store = stored(tmp_path / "run")
    first = Recorded((1, 2, 1), (2, 1, 2, 8, 0), 9, "eos")
    second = Recorded((1, 2, 1), (2, 1, 2, 8, 1), 9, "eos")
    expected = [
        Outputs("a", 0.0, (first,)),
        Outputs("a", 1.0, (first, second)),
        Outputs("b", 0.0, (first,)),
    ]
    found = replay.from_run(store)
    assert sorted(found, key=lambda group: (group.workload, group.temperature or 0)) == expected
    assert replay.from_run(store, ["b"]) == expected[2:]


def test_a_file_of_outputs(tmp_path: Path) -> None:
    """Lines are grouped by workload and temperature where these are given."""
    path = tmp_path / "answers.jsonl"
    lines = [
        {"prompt": [1], "output": [2, 3]},
        {"prompt": [1], "output": [2, 3], "id": "again"},
        {"prompt": [4], "output": [5], "workload": "w", "temperature": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    assert replay.from_jsonl(path) == [
        Outputs("answers", None, (Recorded((1,), (2, 3), 2, "budget"),)),
        Outputs("w", 1.0, (Recorded((4,), (5,), 1, "budget"),)),
    ]
    assert [group.workload for group in replay.from_jsonl(path, ["w"])] == ["w"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no outputs"),
        ("\n{", "line 2: not JSON"),
        ("[1]", "line 1: expected an object"),
        ('{"prompt": [1]}', "'output' is None; expected a list of token ids"),
        ('{"prompt": [], "output": [1]}', "'prompt' is []"),
        ('{"prompt": "text", "output": [1]}', "'prompt' is 'text'"),
        ('{"prompt": [1], "output": [1.5]}', "'output' is [1.5]"),
        ('{"prompt": [1], "output": [true]}', "'output' is [True]"),
        ('{"prompt": [1], "output": [-1]}', "'output' is [-1]"),
        ('{"prompt": [1], "output": [1], "workload": 3}', "'workload' is 3"),
        ('{"prompt": [1], "output": [1], "temperature": NaN}', "'temperature' is nan"),
        ('{"prompt": [1], "output": [1], "temperature": "hot"}', "'temperature' is 'hot'"),
    ],
)
def test_a_file_that_is_none(text: str, words: str, tmp_path: Path, capsys: Captured) -> None:
    """What is wrong with a line is said in one, with the place, and the exit code is 2."""
    path = tmp_path / "answers.jsonl"
    path.write_text(text, encoding="utf-8")
    assert main(["replay", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {path}")
    assert words in captured.err.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([str(GOLDEN)], "has no recorded outputs"),
        ([str(PUBLISHED), "--strategy", "draft:k=3"], "'draft:k=3' drafts with a model"),
        ([str(PUBLISHED), "--strategy", "early-exit:layers=2,k=2"], "drafts with a model"),
        ([str(PUBLISHED), "--strategy", "sufix"], "did you mean 'suffix'?"),
        ([str(PUBLISHED), "--strategy", "suffix:max=0"], "expected at least 1"),
        ([str(PUBLISHED), "--strategy", "suffix:nodse=3"], "did you mean 'nodes'?"),
        ([str(PUBLISHED), "--workload", "novle"], "did you mean 'novel'?"),
        ([str(PUBLISHED), "--format", "jsn"], "did you mean 'json'?"),
        (["nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["nowhere"], "no run 'nowhere'"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_wrong_usage(arguments: list[str], words: str, capsys: Captured) -> None:
    """What cannot be replayed is refused in one line with exit code 2."""
    assert main(["replay", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert words in captured.err.splitlines()[0]


def test_a_simulated_run_is_refused(tmp_path: Path) -> None:
    """The tokens of a simulation mean nothing."""
    with pytest.raises(UsageError, match="simulated"):
        replay.from_run(stored(tmp_path / "run", engine="simulated"))


def test_the_command_prints_a_table(tmp_path: Path, capsys: Captured) -> None:
    """Terminal, Markdown and JSON say the same: per workload and for all, and how far to trust it."""
    stored(tmp_path / "run")
    call = ["replay", str(tmp_path / "run"), "--strategy", "suffix:k=2", "--strategy", "ngram:min=1"]
    assert main([*call, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["source"] == "run run"
    assert len(document["results"]) == 2 * 4
    assert document["results"][0]["workload"] == "a"
    assert document["results"][-1]["workload"] is None
    assert document["results"][-1]["outputs"] == 4
    # Prompt 1 2 1, prefill 2; then "1 2" is known, and 8 follows: one step instead of three.
    assert document["results"][0]["tokens_per_target_step"] == 2.0
    assert document["results"][0]["draft_step_share"] == 0.5
    assert main([*call, "--width", "100"]) == 0
    text = capsys.readouterr().out
    assert main([*call, "--format", "markdown"]) == 0
    markdown = capsys.readouterr().out
    for out in (text, " ".join(markdown.replace("\\", "").split())):
        assert "specbench replay: run run" in out
        assert "exact. Every lossless rule" in out
        assert "exact-match verification" in out
        assert "2.00" in out
    # One greedy workload alone: nothing is estimated, nothing is summed up.
    assert main([*call, "--workload", "b"]) == 0
    text = capsys.readouterr().out
    assert "T>0" not in text
    assert not any(line.startswith("all ") for line in text.splitlines())


def test_outputs_of_one_token(tmp_path: Path, capsys: Captured) -> None:
    """Where nothing was decoded the figures are absent, not zero."""
    path = tmp_path / "short.jsonl"
    path.write_text('{"prompt": [1], "output": [2]}\n', encoding="utf-8")
    assert main(["replay", str(path), "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)["results"][0]
    assert entry["decode_rounds"] == 0
    assert entry["tokens_per_target_step"] is None
    assert entry["draft_step_share"] is None
    assert main(["replay", str(path)]) == 0
    assert "No output has a second token" in capsys.readouterr().out
