"""The bundled pair from end to end: trained models, real acceptance, every kind of strategy in one run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Pair

from specbench import workloads
from specbench.audit import continuations
from specbench.bench.config import MODEL_SETS, RunConfig
from specbench.bench.run import outcome, run
from specbench.bench.store import Run, RunStore
from specbench.grammar import parse_grammar
from specbench.metrics.acceptance import RoundCounts, count_rounds
from specbench.records import CellRecords, RequestRecord, RoundRecord
from specbench.report import report

STRATEGIES = (
    "ngram:k=4",
    "suffix:k=6,nodes=8",
    "draft:k=3",
    "draft:topk=2,depth=3",
    "draft:k=3,verify=block",
    "draft:k=4,policy=ema",
    "draft:k=4,policy=confidence(threshold=0.4)",
    "early-exit:layers=2,k=2",
)


class Silent:
    """Tells nobody how a run is getting on."""

    def stage(self, text: str, total: int | None = None) -> None: ...
    def advance(self, amount: int = 1, text: str | None = None) -> None: ...
    def say(self, text: str) -> None: ...


class Measured:
    """A finished run and its records."""

    def __init__(self, document: Run, folder: Path) -> None:
        self.document = document
        self.cells = RunStore.open(folder / "run").cells()

    def of(self, strategy: str, temperature: float | None = None) -> list[CellRecords]:
        """Return the cells of a strategy, at one temperature or at all of them."""
        return [
            c for c in self.cells if c.key.strategy == strategy and temperature in (None, c.key.temperature)
        ]


def measure(folder: Path, *, workload: str, **changes: object) -> Measured:
    chosen = MODEL_SETS["tiny"]
    config = RunConfig(
        target=chosen.target, draft=chosen.draft, dtype=chosen.dtype, workloads=(workload,), audit=False
    ).resolved(**changes)
    return Measured(run(config, folder, Silent(), run_id="run", fresh=True), folder)


def requests(cells: list[CellRecords]) -> Iterator[RequestRecord]:
    return (request for cell in cells for serving in cell.servings for request in serving.requests)


def rounds(cells: list[CellRecords]) -> list[RoundRecord]:
    """Return the rounds after the prefills."""
    return [r for cell in cells for serving in cell.servings for r in serving.rounds if r.round]


def counts(cells: list[CellRecords]) -> RoundCounts:
    return count_rounds(rounds(cells))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Every strategy on two predictable prompts, alone and two at a time, greedy and sampled."""
    return measure(
        tmp_path_factory.mktemp("text"),
        workload="tiny-predictable",
        strategies=STRATEGIES,
        loads=("c=1", "c=2"),
        limit=2,
        max_new_tokens=24,
    )


@pytest.fixture(scope="module")
def structured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Every strategy on one prompt of each kind whose answer a grammar constrains."""
    return measure(
        tmp_path_factory.mktemp("structured"), workload="tiny-structured", strategies=STRATEGIES, limit=5
    )


def test_every_strategy_finishes(text: Measured) -> None:
    """Two prompts, two loads and two temperatures give each strategy eight answers, and its row a report."""
    assert text.document.status == "complete"
    printed = report(text.document, "markdown", None)
    for strategy in ("ordinary", "ordinary#2", *STRATEGIES):
        records = list(requests(text.of(strategy)))
        assert len(records) == 8
        assert all(record.error is None and record.output_tokens for record in records)
    for strategy in STRATEGIES:
        assert strategy in printed.replace("\\", "")


def test_greedy_answers_are_the_targets(text: Measured, pair: Pair) -> None:
    """At temperature 0 every token is the most likely one after an uncached forward, up to rounding."""
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for strategy in ("ordinary", "ordinary#2", *STRATEGIES):
        seen |= {(r.prompt_tokens, r.output_tokens) for r in requests(text.of(strategy, 0.0))}
    for prompt, output in seen:
        with torch.inference_mode():
            logits = pair.target.model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert float((logits.max(1).values - chosen).max()) < 1e-3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_speculates(text: Measured, strategy: str) -> None:
    """Each of them drafts; those with the trained draft need fewer steps than tokens by a fair margin."""
    found = counts(text.of(strategy))
    assert found.drafted > 0
    assert found.emitted >= found.decode_rounds
    if strategy.startswith("draft"):
        assert found.accepted > 0
        assert found.emitted > 1.2 * found.decode_rounds


def test_a_tree_stays_within_its_shape(text: Measured) -> None:
    """No more levels than asked for, siblings among them, every parent before its children."""
    drafted = [r for r in rounds(text.of("draft:topk=2,depth=3")) if r.drafted]
    assert {r.draft_depth for r in drafted} <= {1, 2, 3}
    alone = [r.draft_parents for r in drafted if r.draft_parents]
    assert any(len(set(parents)) < len(parents) for parents in alone)
    assert all(parent < node for parents in alone for node, parent in enumerate(parents))


def test_confidence_stops_at_the_first_doubt(text: Measured) -> None:
    """A draft goes on while its tokens are likely enough, and some stop early at one that is not."""
    cells = text.of("draft:k=4,policy=confidence(threshold=0.4)", 1.0)
    drafts = [r.draft_probs for r in rounds(cells) if r.draft_probs]
    assert all(prob >= 0.4 for probs in drafts for prob in probs[:-1])
    assert any(probs[-1] < 0.4 for probs in drafts if len(probs) < 4)


def test_structured_answers_obey_their_grammars(structured: Measured, pair: Pair) -> None:
    """Whatever the strategy and temperature, an answer that ended is JSON, a match, or one of the choices."""
    prompts = {prompt.id: prompt for prompt in workloads.load("tiny-structured").limited(5).prompts}
    ended = dict.fromkeys(STRATEGIES, 0)
    for strategy in ended:
        for record in requests(structured.of(strategy)):
            grammar = prompts[record.prompt_id].grammar
            assert grammar is not None
            assert record.sampling.grammar in (grammar, None)
            if record.sampling.grammar is None:  # the twin workload, measured without
                continue
            parsed, body = parse_grammar(grammar), grammar.partition(":")[2]
            text = pair.target.tokenizer.decode(record.output_tokens, skip_special_tokens=True)
            if record.finish_reason != "eos":
                assert record.finish_reason == "length"
                continue
            ended[strategy] += 1
            if parsed.kind == "json":
                assert list(json.loads(text)) == json.loads(body)["required"]
            elif parsed.kind == "choice":
                assert text in parsed.choices
            else:
                assert re.fullmatch(body, text)
    assert all(number >= 8 for number in ended.values())  # of ten; a long one may be cut off


@pytest.mark.parametrize(("fault", "verdict"), [(None, "PASS"), ("accept-all", "FAIL")])
def test_the_audit_of_trained_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None, verdict: str
) -> None:
    """A tree of drafts passes the chi-squared check, and fails it once every draft is accepted."""
    monkeypatch.setattr(continuations, "DETECTABLE_TV", 0.1)  # a quarter of the draws
    measured = measure(
        tmp_path,
        workload="tiny-short-output",
        strategies=("draft:topk=2,depth=2",),
        limit=1,
        max_new_tokens=4,
        loads=("c=1",),
        temperatures=(1.0,),
        audit=True,
        inject=fault,
    )
    verdicts = {audit.strategy: audit.verdict for audit in measured.document.audits}
    assert verdicts == {"ordinary": "PASS", "draft:topk=2,depth=2": verdict}
    assert outcome(measured.document) == (fault is not None)
