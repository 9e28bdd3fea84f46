"""Tests of the coarser alphabet: it is a partition, factors stay fair bets, and little power is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from specbench.audit import lumping
from specbench.audit.alternatives import Alternatives
from specbench.audit.lumping import ALONE, LARGEST_WHOLE, lump
from specbench.audit.proposals import Proposals

VOCAB = LARGEST_WHOLE + 404
SMALLEST = 1e-290


def laws(rows: int, seed: int, *, top_k: int = 0) -> tuple[Tensor, Tensor]:
    """Peaked laws as a language model has, and a draft's near them; with `top_k` most ids are impossible."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64)
    if top_k:
        edge = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < edge, -torch.inf)
    noise = torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), (logits + 0.7 * noise).softmax(-1)


@pytest.mark.parametrize("top_k", [0, 40, 1000])
def test_symbols_are_a_partition_that_sums_both_laws(top_k: int) -> None:
    p, q = laws(3, 1, top_k=top_k)
    found = lump(p, q, smallest=SMALLEST)
    ids = torch.arange(VOCAB)
    for row in range(3):
        one = lump(p[row : row + 1].expand(VOCAB, -1), q[row : row + 1].expand(VOCAB, -1), smallest=SMALLEST)
        symbols = one.symbols(ids)
        for law, lumped in ((p[row], found.p[row]), (q[row], found.q[row])):  # type: ignore[index]
            summed = torch.zeros(2 * ALONE + 2, dtype=torch.float64).index_add(0, symbols, law)
            assert torch.allclose(summed, lumped, rtol=1e-9, atol=1e-15)
        held = torch.zeros(2 * ALONE + 2, dtype=torch.float64).index_add(0, symbols, (p[row] > 0).double())
        assert torch.equal(held, found.count[row])
        likeliest = torch.maximum(p[row], q[row]).topk(20).indices
        assert bool((found.count[row][symbols[likeliest]] <= 1).all())


def test_runs_keep_their_place_between_ids() -> None:
    p, q = laws(1, 2)
    symbols = lump(p.expand(VOCAB, -1), q.expand(VOCAB, -1), smallest=SMALLEST).symbols(torch.arange(VOCAB))
    in_order = symbols[symbols < 2 * ALONE + 1]  # all but the rest
    assert bool((in_order.diff() >= 0).all())
    assert len(in_order) < VOCAB


@pytest.mark.parametrize("top_k", [0, 40])
def test_every_factor_is_a_fair_bet_under_the_null(top_k: int) -> None:
    p, q = laws(1, 3, top_k=top_k)
    scores = Alternatives(has_draft=True).score(p.expand(VOCAB, -1), torch.arange(VOCAB), q.expand(VOCAB, -1))
    weights = p[0].numpy()
    mean = weights @ np.exp(scores.log_factors)
    assert np.abs(mean - 1).max() < 1e-12
    assert np.abs(weights @ scores.witness).max() < 1e-12
    assert np.array_equal(scores.supported, weights > 0)


def test_shifts_are_the_expectation_of_witnesses_under_another_law() -> None:
    p, q = laws(1, 15)
    other = (0.9 * p + 0.1 * q).sqrt()
    other = other / other.sum(-1, keepdim=True)
    alternatives = Alternatives(has_draft=True)
    witness = alternatives.score(p.expand(VOCAB, -1), torch.arange(VOCAB), q.expand(VOCAB, -1)).witness
    found = alternatives.shifts(p, q, [other])[0, 0]
    assert np.abs(found).max() > 0.01
    assert found == pytest.approx(other[0].numpy() @ witness, abs=1e-12)


def test_evidence_is_nearly_what_all_ids_would_give(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = laws(400, 4)
    alternatives = Alternatives(has_draft=True)
    tokens = torch.multinomial(0.5 * (p + q), 1, generator=torch.Generator().manual_seed(5)).squeeze(1)
    lumped, planned = alternatives.score(p, tokens, q), alternatives.plan(p[:40], q[:40])
    monkeypatch.setattr("specbench.audit.alternatives.LARGEST_WHOLE", VOCAB)
    whole, plan = alternatives.score(p, tokens, q), alternatives.plan(p[:40], q[:40])
    column = alternatives.names.index("draft-mix:0.1")
    assert lumped.log_factors[:, column].sum() > 0.8 * whole.log_factors[:, column].sum() > 5
    for name in ("draft-mix", "lean-to-draft", "residual-from-p", "greedy-mix", "id-up"):
        assert planned.growth[name][-4].max() > 0.75 * plan.growth[name][-4].max()
        assert planned.tv[name] == pytest.approx(plan.tv[name], rel=0.2)


def test_ids_that_cannot_be_expected_show_at_once() -> None:
    p, q = laws(300, 6)
    random = torch.randint(VOCAB, (300,), generator=torch.Generator().manual_seed(7))
    drawn = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(8)).squeeze(1)
    is_corrupt = torch.rand(300, generator=torch.Generator().manual_seed(9)) < 0.2
    alternatives = Alternatives(has_draft=True)
    column = alternatives.names.index("uniform-mix:0.05")
    for tokens, alarms in ((drawn, False), (torch.where(is_corrupt, random, drawn), True)):
        evidence = alternatives.score(p, tokens, q).log_factors[:, column].sum()
        assert (evidence > 7) == alarms


def test_a_negative_probability_is_refused_also_where_it_would_be_lumped() -> None:
    p, _ = laws(1, 10)
    least, largest = int(p.argmin()), int(p.argmax())
    p[0, least] -= 1e-6
    p[0, largest] += 1e-6
    with pytest.raises(ValueError, match="negative"):
        Alternatives(has_draft=False).score(p, torch.tensor([largest]))


def test_proposals_over_a_large_vocabulary() -> None:
    _, q = laws(400, 11)
    generator = torch.Generator().manual_seed(12)
    for exponent, alarms in ((1.0, False), (1.3, True)):
        law = (q**exponent) / (q**exponent).sum(-1, keepdim=True)
        tokens = torch.multinomial(law, 1, generator=generator).squeeze(1)
        proposals = Proposals(alpha=1e-3)
        proposals.add(q.numpy(), tokens.numpy())
        assert proposals.result().alarm == alarms


def test_proposals_of_a_large_vocabulary_are_fair_bets() -> None:
    _, q = laws(1, 13)
    weighed = Proposals(alpha=1e-3).weigh(q.expand(VOCAB, -1).numpy(), np.arange(VOCAB))
    assert np.abs(q[0].numpy() @ np.exp(weighed.log_factors) - 1).max() < 1e-9


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = laws(5, 14)
    whole = lump(p, q, smallest=SMALLEST)
    monkeypatch.setattr(lumping, "BLOCK_VALUES", 2 * VOCAB)
    blocks = lump(p, q, smallest=SMALLEST)
    assert all(
        torch.equal(getattr(whole, name), getattr(blocks, name))
        for name in ("p", "q", "count", "alone", "is_rare")
    )
