"""What the plots of an audit are drawn from: on paths and laws made up here, and in audits of tiny models."""

from __future__ import annotations

import doctest
import importlib
import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats
from tiny_models import CONTEXT, build, copied, perturbed
from torch import Tensor

from specbench import stats
from specbench.audit import session, traces
from specbench.audit.alternatives import FloatArray
from specbench.audit.budget import Budget
from specbench.audit.e_process import EProcess
from specbench.audit.reference import Oracle
from specbench.audit.session import Subject
from specbench.audit.traces import MOST_POINTS, PIT_BINS, TraceRecorder, randomised_pit
from specbench.audit.verdicts import AuditRecord
from specbench.bench.store import rebuild
from specbench.engines.local import LocalEngine
from specbench.records import SamplingParams

LEVEL = 1e-3
"""Of every test of uniformity here, decided before anything was drawn."""


def uniformity(counts: Any) -> float:
    """Return the p-value of equal shares, by Pearson's test."""
    return float(scipy_stats.chisquare(np.asarray(counts)).pvalue)


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(traces).failed == 0


# Thinning


def walk(tokens: int, columns: int, seed: int) -> FloatArray:
    """Return a random walk in each column, with its peak far from both ends."""
    steps = np.random.default_rng(seed).normal(size=(tokens, columns))
    return np.asarray(steps.cumsum(0) + 0.01 * np.minimum(np.arange(tokens), tokens // 2)[:, None])


def recorded(path: FloatArray, sizes: list[int]) -> TraceRecorder:
    """Feed a path in pieces of these sizes, over and over."""
    recorder = TraceRecorder(["own", "bad"])
    start = number = 0
    while start < len(path):
        stop = start + sizes[number % len(sizes)]
        piece = path[start:stop]
        recorder.add(("own", "bad")[number % 2], piece, np.full(len(piece), 0.5))
        start, number = stop, number + 1
    return recorder


@pytest.mark.parametrize("tokens", [1, 50, 299, 300, 301, 4_999, 20_000])
def test_thinning_keeps_first_last_and_largest(tokens: int) -> None:
    """However long the audit, few points are kept, each as it was, and these three among them."""
    path = walk(tokens, 3, seed=tokens)
    found = recorded(path, [7, 32, 1]).result()
    assert len(found.tokens) == len(found.log_e) <= MOST_POINTS + 2
    assert len(found.tokens) >= min(tokens, MOST_POINTS // 2)
    assert list(found.tokens) == sorted(set(found.tokens))
    assert (found.tokens[0], found.log_e[0]) == (0, 0.0)
    assert found.tokens[-1] == tokens
    assert max(found.log_e) == max(0.0, round(float(path[:, 0].max()), traces.DECIMALS))
    kept = np.array(found.tokens[1:]) - 1
    for column, values in enumerate([found.log_e, *found.log_e_by_regime.values()]):
        assert np.array(values[1:]) == pytest.approx(path[kept, column], abs=1e-4)


def test_thinning_depends_on_the_number_of_tokens_alone() -> None:
    """In pieces of any size the same points are kept, and after an interruption too."""
    path = walk(5_000, 3, seed=1)
    whole = recorded(path, [5_000]).result()
    pieces = recorded(path, [3, 100, 31]).result()
    assert (whole.tokens, whole.log_e, whole.log_e_by_regime) == (
        pieces.tokens,
        pieces.log_e,
        pieces.log_e_by_regime,
    )
    first = recorded(path[:1_234], [32])
    resumed = TraceRecorder.resume(json.loads(json.dumps(first.state())))
    for recorder in (first, resumed):
        recorder.add("bad", path[1_234:], np.linspace(0, 1, len(path) - 1_234))
    assert resumed.result() == first.result()
    assert (first.result().tokens, first.result().log_e) == (whole.tokens, whole.log_e)


def test_the_e_process_returns_its_path() -> None:
    """Its largest value, its alarm, its end and those of the regimes are what the result says."""
    generator = torch.Generator().manual_seed(2)
    p = torch.rand(40, 5, generator=generator, dtype=torch.float64)
    p = p / p.sum(1, keepdim=True)
    process = EProcess({"own": False, "bad": False}, alpha=LEVEL)
    paths = []
    for number in range(20):
        regime = ("own", "bad")[number % 2]
        scores = process.alternatives(regime).score(p, p.argmax(1))
        paths.append(process.update(regime, scores, np.full(40, number), np.arange(40)))
    path, result = np.concatenate(paths), process.result()
    assert result.is_rejected
    assert path[:, 0].max() == result.log_supremum
    assert int((path[:, 0] >= -np.log(LEVEL)).argmax()) + 1 == result.tokens_at_alarm
    assert path[-1].tolist() == pytest.approx(
        [result.log_e_value, *(regime.log_e_value for regime in result.regimes)]
    )


# The probability integral transform


def laws(rows: int, vocab: int, seed: int) -> Tensor:
    """Draw rows of probabilities, flat and peaked ones, some tokens impossible."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 2
    logits[torch.rand(rows, vocab, generator=generator) < 0.3] = -torch.inf
    logits[:, 3] = 0.0
    return logits.softmax(-1)


def by_inverse_cdf(p: Tensor, numbers: FloatArray) -> Tensor:
    """Return the token of each row that a number falls upon, ids in order."""
    edges = p.cumsum(1)
    found = torch.searchsorted(edges, torch.from_numpy(numbers)[:, None] * edges[:, -1:], right=True)
    return found.squeeze(1).clamp(max=p.shape[1] - 1)


def histogram(p: Tensor, tokens: Tensor) -> Any:
    """Return the counts of the values of sequences of 40 tokens."""
    recorder = TraceRecorder(["own"])
    for seed, start in enumerate(range(0, len(p), 40)):
        part = slice(start, start + 40)
        values = randomised_pit(p[part], tokens[part], seed)
        recorder.add("own", np.zeros((len(values), 2)), values)
    return recorder.result().pit["own"]


def test_the_transform_is_uniform_where_tokens_follow_the_law() -> None:
    """The counts hold every token, and equal shares are not rejected."""
    p = laws(8_000, 9, seed=3)
    tokens = by_inverse_cdf(p, np.random.default_rng(4).random(8_000))
    counts = histogram(p, tokens)
    assert (len(counts), sum(counts)) == (PIT_BINS, 8_000)
    assert uniformity(counts) > LEVEL


def test_the_transform_shows_a_skewed_number() -> None:
    """Sampling by inverse CDF with a number that is no longer uniform shows at once."""
    p = laws(8_000, 9, seed=3)
    tokens = by_inverse_cdf(p, np.random.default_rng(4).random(8_000) ** 1.3)
    counts = histogram(p, tokens)
    assert uniformity(counts) < 1e-6
    assert counts[0] > 1.3 * sum(counts) / PIT_BINS


def test_the_transform_can_be_repeated() -> None:
    """The same sequence gives the same values, another seed others, and all lie in the token's step."""
    p = laws(200, 9, seed=5)
    tokens = by_inverse_cdf(p, np.random.default_rng(6).random(200))
    values = randomised_pit(p, tokens, 7)
    assert values.tolist() == randomised_pit(p, tokens, 7).tolist()
    assert values.tolist() != randomised_pit(p, tokens, 8).tolist()
    upper = p.cumsum(1).gather(1, tokens[:, None]).squeeze(1).numpy()
    assert (values <= upper + 1e-12).all()
    assert (values >= upper - p.gather(1, tokens[:, None]).squeeze(1).numpy() - 1e-12).all()


# In an audit

PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6, 5, 3), (2, 7, 1), (16, 0, 16, 4))


@pytest.fixture(scope="module")
def subject() -> Subject:
    """A random target, a draft that resembles it, and one branch prompt."""
    target = build("llama", head=0.35)
    engine = LocalEngine(
        copied(target, "sdpa"), eos_ids=(11,), draft=perturbed(target, 0.3), rows=32, width=CONTEXT
    )
    sampling = SamplingParams()
    return Subject(
        engine=engine,
        sampling=sampling,
        prompts=PROMPTS,
        branch_prompts=(PROMPTS[0],),
        budget=Budget("test", 3_000, 0.25, 0.1),
        strategies=2,
        seed=0,
        dtype="float32",
        scales=session.calibrate_regimes(Oracle(engine.runner.model, sampling), PROMPTS),
    )


@pytest.fixture(scope="module")
def correct(subject: Subject) -> AuditRecord:
    """A correct strategy, audited with its continuations."""
    return session.audit(subject, "draft:k=2")


def test_an_audit_of_a_correct_decoder_is_traced(correct: AuditRecord) -> None:
    """The trace ends where the audit does, knows its largest evidence; PIT counts hold every token."""
    found = correct.traces
    assert found is not None
    assert found.tokens[-1] == correct.tokens
    assert max(found.log_e) == pytest.approx(max(0.0, correct.log_e), abs=1e-4)
    assert list(found.log_e_by_regime) == list(found.pit) == ["own", "self", "good", "bad"]
    assert sum(map(sum, found.pit.values())) == correct.tokens
    for regime, counts in found.pit.items():
        assert uniformity(counts) > LEVEL / len(found.pit), (regime, counts)


def test_the_cells_of_continuations_are_stored(correct: AuditRecord) -> None:
    """They give the statistic and the degrees of freedom, and hold every draw and every expectation."""
    checked = correct.chi_squared
    assert checked is not None
    (table,) = checked.tables
    assert table.prompt == PROMPTS[0]
    observed = [cell.observed for cell in table.cells]
    expected = [cell.expected for cell in table.cells]
    assert sum(observed) == checked.draws == pytest.approx(sum(expected))
    assert stats.chi_squared_statistic(observed, expected) == pytest.approx(checked.statistic)
    assert checked.df == len(table.cells) - 1
    assert all(cell.text is None for cell in table.cells)  # no tokenizer here
    whole = [cell for cell in table.cells if cell.is_whole]
    assert all(cell.tokens is not None and len(cell.tokens) <= checked.horizon for cell in whole)


def test_a_fault_shows(subject: Subject) -> None:
    """Drafts that are all let through leave the expected level; the trace passes the bar at the alarm."""
    alter = importlib.import_module("specbench.audit.faults.accept_all").alter
    # The picture needs many more tokens than the alarm, which is looked for after each batch.
    large = replace(subject, branch_prompts=(), budget=Budget("large", 40_000, 0.25), batch=256)
    record = session.audit(large, "draft:k=2", alter=alter, sequences_only=True)
    found = record.traces
    assert found is not None
    assert record.tokens_at_alarm is not None
    points = zip(found.tokens, found.log_e, strict=True)
    assert max(log_e for tokens, log_e in points if tokens < record.tokens_at_alarm) < record.bar
    assert record.bar <= max(found.log_e)
    assert uniformity(found.pit["own"]) < LEVEL


def test_the_record_survives_and_old_ones_open(correct: AuditRecord) -> None:
    """Traces and tables come back as they were; a record stored before there were any has none."""
    stored = json.loads(json.dumps(asdict(correct)))
    assert rebuild(AuditRecord, stored, "audit.json").traces == correct.traces
    assert rebuild(AuditRecord, stored, "audit.json").chi_squared == correct.chi_squared
    del stored["traces"], stored["chi_squared"]["tables"]
    old = rebuild(AuditRecord, stored, "audit.json")
    assert old.traces is None
    assert old.chi_squared.tables == ()
    assert old.components == correct.components
