"""The companion tests on what the real loop records: quiet where it is correct, loud where it was broken."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tiny_models import CONTEXT, VOCAB, collect, copied, perturbed, shared, uncached

from specbench.audit import support
from specbench.audit.acceptance import TokenAcceptance
from specbench.audit.betting import FloatArray
from specbench.audit.collisions import Collisions
from specbench.audit.faults import accept_all, accepts_too_often
from specbench.audit.greedy_regret import FEWEST_TOKENS, GreedyRegret, regrets, tolerance
from specbench.audit.proposals import Proposals
from specbench.engines.local import LocalEngine
from specbench.records import Request, SamplingParams, Schedule

ALPHA = 5e-5
REQUESTS = 120
TOKENS = 24
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6, 5, 3), (2,), (16, 0, 16))
FAULTS: dict[str, Any] = {
    "none": None,
    "accept all": accept_all.alter,
    "accepts too often": accepts_too_often.alter,
}


@dataclass(frozen=True)
class Scored:
    """All tested positions in commit order, and the emitted tokens with their laws."""

    accepted: list[bool]
    p_at: list[float]
    q_at: list[float]
    q_rows: list[FloatArray]
    drafted: list[int]
    logits: FloatArray
    emitted: list[int]
    completions: list[tuple[int, tuple[int, ...], float]]


def softmax(logits: FloatArray) -> FloatArray:
    rows = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(rows / rows.sum(-1, keepdims=True))


@functools.cache
def decoded(fault: str, **sampling: Any) -> Scored:
    """Decode with drafts, then score every tested draft token by plain forwards along the emitted text."""
    target, draft = shared("llama"), perturbed(shared("llama"), 0.3)
    engine = LocalEngine(copied(target, "sdpa"), eos_ids=(), draft=draft, rows=8, width=CONTEXT)
    alter: Callable[..., Any] | None = FAULTS[fault]
    engine.open("draft:k=3", alter=alter)
    requests = tuple(
        Request(
            i,
            PROMPTS[i % 3],
            SamplingParams(**{"temperature": 1.0, "seed": 900 + i, "max_new_tokens": TOKENS, **sampling}),
        )
        for i in range(REQUESTS)
    )
    served = collect(engine.serve(Schedule(requests, concurrency=8, record_drafts=True)))
    result = Scored([], [], [], [], [], np.empty((REQUESTS * TOKENS, VOCAB)), [], [])
    for request in requests:
        text = (*request.prompt, *served.records[request.id].output_tokens)
        first = len(request.prompt) - 1  # the row that gives the first output token
        logits = uncached(target, text).double().numpy()[first:-1]
        p = softmax(logits)
        q = softmax(uncached(draft, text).double().numpy()[first:-1])
        emitted = text[first + 1 :]
        done = len(result.emitted)
        result.logits[done : done + TOKENS] = logits
        result.emitted.extend(emitted)
        log_p = float(np.log(p[np.arange(TOKENS), emitted]).sum())
        result.completions.append((request.id % 3, emitted, log_p))
        place = 0
        for entry in (r for r in served.rounds if r.request == request.id):
            tokens, claimed = entry.draft_tokens or (), entry.draft_probs or ()
            for i in range(min(entry.accepted + entry.rejected, TOKENS - place)):
                result.accepted.append(i < entry.accepted)
                result.p_at.append(float(p[place + i, tokens[i]]))
                result.q_at.append(claimed[i])
                result.q_rows.append(q[place + i])
                result.drafted.append(tokens[i])
            place += entry.emitted
    return result


def acceptance_of(found: Scored) -> TokenAcceptance:
    coins = TokenAcceptance(ALPHA)
    coins.add(found.accepted, found.p_at, found.q_at)
    return coins


def test_what_was_recorded_is_what_the_test_needs() -> None:
    """Both outcomes occur often, and the recorded q is that of plain forwards of the draft."""
    found = decoded("none")
    assert 0.3 < np.mean(found.accepted) < 0.95
    assert len(found.accepted) > 2000
    recomputed = [row[token] for row, token in zip(found.q_rows, found.drafted, strict=True)]
    assert found.q_at == pytest.approx(recomputed, abs=1e-4)


@pytest.mark.parametrize(
    ("fault", "alarm"), [("none", False), ("accept all", True), ("accepts too often", True)]
)
def test_acceptance(fault: str, alarm: bool) -> None:
    """The real coins are accepted as often as they should be; those of broken rules too often."""
    coins = acceptance_of(decoded(fault))
    assert coins.result().alarm is alarm
    assert (abs(coins.z) < 3.5) is not alarm


def test_proposals() -> None:
    """The draft samples what it says; claims at another temperature are found false."""
    found = decoded("none")
    q = np.array(found.q_rows)
    honest, false = Proposals(ALPHA), Proposals(ALPHA)
    honest.add(q, found.drafted)
    false.add(q**0.6, found.drafted)
    assert not honest.result().alarm
    assert false.result().alarm


def test_collisions() -> None:
    """Streams of the real loop are separate; sending the same request twice is found."""
    streams = Collisions(ALPHA)
    for prompt, tokens, log_p in decoded("none").completions:
        streams.add(prompt, tokens, log_p)
    assert not streams.result().alarm
    prompt, tokens, log_p = decoded("none").completions[0]
    streams.add(prompt, tokens, log_p)
    assert streams.result().alarm


@pytest.mark.parametrize(
    ("fault", "top_k", "alarm"), [("none", 6, False), ("none", 5, True), ("accept all", 6, True)]
)
def test_support(fault: str, top_k: int, alarm: bool) -> None:
    """Top-k of the real loop is the oracle's; another k, and draft tokens let through, are found."""
    found = decoded(fault, top_k=6)
    zone = support.zones(found.logits, 1e-4, top_k=top_k)
    margin = support.Margin(ALPHA)
    margin.add(zone[np.arange(len(found.emitted)), found.emitted])
    exact = support.exact(np.where(zone >= 0, softmax(found.logits), 0.0), found.emitted)
    assert margin.result().alarm is alarm
    assert exact.alarm is alarm


@pytest.mark.parametrize(("fault", "alarm"), [("none", False), ("accept all", True)])
def test_greedy_regret(fault: str, alarm: bool) -> None:
    """At temperature 0 the real loop emits the largest logit; accepting everything does not."""
    found = decoded(fault, temperature=0.0)
    limit = tolerance(np.zeros(FEWEST_TOKENS), dtype="float32")
    test = GreedyRegret(ALPHA, limit)
    test.add(regrets(found.logits, found.emitted))
    assert test.result().alarm is alarm
    assert math.isfinite(test.largest)
