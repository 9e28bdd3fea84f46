"""Block verification against exact laws, token-wise verification, and the figures of its paper."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from specbench.decoding.distribution import Distribution, excess
from specbench.decoding.random_numbers import Purpose, RoundRandom, stream_keys
from specbench.decoding.verification import BlockVerification, Proposal, RejectionSampling
from tests.tables import Scripted, table, tables
from tests.toy import (
    Toy,
    chain_rounds,
    histories,
    just_above,
    just_below,
    number_of,
    ordinary_law,
    round_law,
    total_variation,
)

EXACT = 1e-12
BLOCK = BlockVerification()
TOKEN = RejectionSampling()


def numbers(batch: int) -> RoundRandom:
    """Return the random numbers of a first round, one seed per row."""
    return RoundRandom(stream_keys(range(batch)), torch.zeros(batch).long(), torch.zeros(batch).long())


def edges(p_rows: Tensor, q_rows: Tensor, drafts: Tensor) -> Tensor:
    """Return h_1 ... h_k of the paper's equation for chains of k tokens, `[B, k]`, from the definition."""
    k = drafts.shape[1]
    joint, found = torch.ones(len(drafts), dtype=torch.float64), []
    for i in range(k):
        own = drafts[:, i : i + 1]
        ratio = (p_rows[:, i].gather(1, own) / q_rows[:, i].gather(1, own)).squeeze(1)
        joint = torch.minimum(joint * ratio, torch.ones_like(joint))
        if i == k - 1:
            found.append(joint)
        else:
            left = (joint[:, None] * p_rows[:, i + 1] - q_rows[:, i + 1]).clamp(min=0).sum(1)
            found.append(torch.where(left > 0, left / (left + 1 - joint), (joint == 1).double()))
    return torch.stack(found, 1)


def block_rounds(
    p: Tensor, q: Tensor, k: int, rule: BlockVerification = BLOCK, form: str = "dense"
) -> list[Tensor]:
    """Return the law of what one round emits: for n = 1 to k + 1, `[V * V, V ** n]`; see `toy.round_law`.

    Each place of the chain passes or not, whatever the others do: 2 ** k regions of coins.
    """
    vocab = p.shape[-1]
    tokens = histories(vocab, k)
    p_rows = p[tokens[:, :-1], tokens[:, 1:]]
    q_rows = q[tokens[:, :-1], tokens[:, 1:]][:, :k]
    drawn = q_rows.gather(-1, tokens[:, 2:, None]).squeeze(-1).prod(1)
    possible = drawn > 0
    tokens, p_rows, q_rows, drawn = (x[possible] for x in (tokens, p_rows, q_rows, drawn))
    drafts = tokens[:, 2:]
    passing = edges(p_rows, q_rows, drafts) if k else torch.zeros(len(drafts), 0).double()
    target = Distribution.point(p_rows.argmax(-1)) if form == "target certain" else Distribution.dense(p_rows)
    law_of_draft = Distribution.point(drafts) if form == "draft certain" else Distribution.dense(q_rows)
    proposal = Proposal.chains(drafts, [k] * len(drafts), law_of_draft)
    joint = rule.joint(target, proposal)
    emitted = [torch.zeros(vocab ** (2 + n), vocab, dtype=torch.float64) for n in range(k + 1)]
    for passed in itertools.product([True, False], repeat=k):
        is_passed = torch.tensor(passed, dtype=torch.bool)
        weight = drawn * torch.where(is_passed, passing, 1 - passing).prod(1)
        coins = torch.where(is_passed, just_below(passing), just_above(passing))
        accepted, rejected = rule.decide(target, proposal, joint, coins)
        law = rule.next_law(target, proposal, joint, accepted, rejected).to_dense(vocab, torch.float64)
        law = weight[:, None] * law / law.sum(1, keepdim=True)
        for n in range(k + 1):
            here = (accepted == n) & (weight > 0)
            emitted[n].index_add_(0, number_of(tokens[here, : 2 + n], vocab), law[here])
    return [law.reshape(vocab**2, -1) for law in emitted]


def accepted_tokens(rounds: list[Tensor]) -> Tensor:
    """Return the expected number of accepted tokens in every context, `[V * V]`."""
    return sum((n * law.sum(1) for n, law in enumerate(rounds)), torch.zeros(1).double())


@given(tables(most=4))
@settings(max_examples=100, deadline=None)
def test_block_verification_emits_the_targets_law(case: tuple[Tensor, Tensor, int]) -> None:
    """Over several rounds and cut in mid-round, whole continuations have exactly the target's law."""
    p, q, k = case
    emitted = chain_rounds(block_rounds(p, q, k), k + 2)
    torch.testing.assert_close(emitted, ordinary_law(p, k + 2), rtol=0, atol=EXACT)


@given(tables(most=4))
@settings(max_examples=50, deadline=None)
def test_it_accepts_at_least_as_much_as_token_by_token(case: tuple[Tensor, Tensor, int]) -> None:
    """In every context the expected number of accepted tokens is that of token-wise verification or more."""
    p, q, k = case
    assert (
        accepted_tokens(block_rounds(p, q, k)) >= accepted_tokens(round_law(TOKEN, p, q, k)) - EXACT
    ).all()


@pytest.mark.parametrize(("k", "gain"), [(1, 0.0), (2, 0.005), (3, 0.02)])
def test_it_accepts_more_on_a_toy(k: int, gain: float) -> None:
    """On chains of several tokens it gains in every context, on chains of one token nothing."""
    toy = Toy.random(4, seed=3)
    draft = toy.blurred(1.0, seed=4).probs
    more = accepted_tokens(block_rounds(toy.probs, draft, k))
    more = more - accepted_tokens(round_law(TOKEN, toy.probs, draft, k))
    assert (more > gain).all() if k > 1 else (more.abs() < EXACT).all()


def test_the_example_of_the_paper() -> None:
    """With p = [1/3, 2/3], q = [2/3, 1/3] and two draft tokens it accepts 11/9, token by token 10/9."""
    p, q = (table(row).expand(2, 2, 2) for row in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
    assert accepted_tokens(block_rounds(p, q, 2)).tolist() == pytest.approx([11 / 9] * 4, abs=EXACT)
    assert accepted_tokens(round_law(TOKEN, p, q, 2)).tolist() == pytest.approx([10 / 9] * 4, abs=EXACT)


@given(tables(most=4))
@settings(max_examples=30, deadline=None)
def test_a_point_mass_means_the_same_in_both_forms(case: tuple[Tensor, Tensor, int]) -> None:
    """A certain draft, and a certain target, are judged alike whether dense or point masses."""
    p, q, k = case
    certain_p, certain_q = (torch.zeros_like(x).scatter(-1, x.argmax(-1, keepdim=True), 1.0) for x in (p, q))
    for target, draft, form in ((p, certain_q, "draft certain"), (certain_p, q, "target certain")):
        dense = block_rounds(target, draft, k)
        points = block_rounds(target, draft, k, form=form)
        for one, other in zip(dense, points, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=EXACT)


def test_the_residual_of_a_single_token_would_show() -> None:
    """With norm(max(p - q, 0)) after a block that was cut, the law of continuations is another."""

    class Unscaled(BlockVerification):
        def next_law(
            self, p: Distribution, proposal: Proposal, joint: Tensor, accepted: Tensor, rejected: Tensor
        ) -> Distribution:
            return super().next_law(p, proposal, torch.ones_like(joint), accepted, rejected)

    toy = Toy.random(3, seed=5)
    draft = toy.blurred(1.0, seed=6).probs
    emitted = chain_rounds(block_rounds(toy.probs, draft, 3, Unscaled()), 5)
    assert (total_variation(emitted, ordinary_law(toy.probs, 5)) > 0.001).all()


# The same numbers as token by token


def random_chains(batch: int, num: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return p `[B, N + 1, V]`, q `[B, N, V]`, and tokens drawn from q."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(batch, num + 1, vocab, generator=generator, dtype=dtype)
    q = (logits[:, :num] + torch.randn(batch, num, vocab, generator=generator, dtype=dtype)).softmax(-1)
    uniforms = torch.rand(batch, num, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), q, Distribution.dense(q).sample(uniforms)


@pytest.mark.parametrize("form", ["dense", "point"])
def test_at_temperature_zero_it_is_token_by_token(form: str) -> None:
    """With a certain target the run, the next token and the rejection are those of rejection sampling."""
    p, q, tokens = random_chains(2000, 4, 3, torch.float32)
    target = Distribution.point(p.argmax(-1))
    law = Distribution.dense(q) if form == "dense" else Distribution.point(tokens)
    proposal = Proposal.chains(tokens, [i % 5 for i in range(2000)], law)
    block, token = (rule.verify(target, proposal, numbers(2000)) for rule in (BLOCK, TOKEN))
    assert torch.equal(block.accepted, token.accepted)
    assert torch.equal(block.next_token, token.next_token)
    assert torch.equal(block.rejected, token.rejected)
    assert len(set(block.accepted.tolist())) == 5


def test_a_chain_of_one_token_is_judged_token_by_token() -> None:
    """Of one token there is no block: the same coin decides alike, and the same token is recovered."""
    p, q, tokens = random_chains(2000, 1, 5, torch.float64)
    proposal = Proposal.chains(tokens, [1] * 2000, Distribution.dense(q))
    block, token = (rule.verify(Distribution.dense(p), proposal, numbers(2000)) for rule in (BLOCK, TOKEN))
    assert torch.equal(block.accepted, token.accepted)
    assert torch.equal(block.next_token, token.next_token)
    assert block.rejected.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draft_like_the_target_is_accepted_whole(dtype: torch.dtype) -> None:
    """With p = q every chain is accepted, and with q off by rounding all but one in a thousand."""
    p, _, _ = random_chains(2000, 4, 50, dtype)
    tokens = Distribution.dense(p[:, :4]).sample(torch.rand(2000, 4, dtype=torch.float64))
    same = Proposal.chains(tokens, [4] * 2000, Distribution.dense(p[:, :4]))
    assert (BLOCK.verify(Distribution.dense(p), same, numbers(2000)).accepted == 4).all()
    close = Proposal.chains(tokens, [4] * 2000, Distribution.dense(p[:, :4] * (1 + 3e-7)))
    outcome = BLOCK.verify(Distribution.dense(p), close, numbers(2000))
    assert (outcome.accepted < 4).double().mean() < 1e-3


# Ragged batches and edges


def test_a_ragged_row_is_judged_as_if_alone() -> None:
    """Of a short row only its own count of tokens is a block, whatever stands beyond, even a law of NaN."""
    p, q, tokens = random_chains(400, 4, 4, torch.float64)
    offered = [i % 5 for i in range(400)]
    beyond = torch.arange(4) >= torch.tensor(offered)[:, None]
    spoiled = q.masked_fill(beyond[..., None], torch.nan)
    together = BLOCK.verify(
        Distribution.dense(p), Proposal.chains(tokens, offered, Distribution.dense(spoiled)), numbers(400)
    )
    for count in range(5):
        rows = torch.arange(count, 400, 5)
        keys = numbers(400)
        alone = BLOCK.verify(
            Distribution.dense(p[rows, : count + 1]),
            Proposal.chains(tokens[rows, :count], [count] * 80, Distribution.dense(q[rows, :count])),
            RoundRandom(keys.keys[rows], keys.positions[rows], keys.rounds[rows]),
        )
        assert torch.equal(together.accepted[rows], alone.accepted)
        assert torch.equal(together.next_token[rows], alone.next_token)
        assert torch.equal(together.rejected[rows], alone.rejected)


def test_an_impossible_token_is_never_accepted() -> None:
    """With p = 0 the smallest coin refuses, whatever q says; a later likely token does not save it."""
    p = table([0.0, 1.0], [0.5, 0.5], [0.5, 0.5])[None]
    for q_first in ([1e-12, 1 - 1e-12], [0.0, 1.0], [1.0, 0.0]):
        q = table(q_first, [0.01, 0.99])[None]
        proposal = Proposal.chains(torch.tensor([[0, 0]]), [2], Distribution.dense(q))
        smallest = torch.full((1, 3), 2.0**-53, dtype=torch.float64)
        script = {
            Purpose.COIN: smallest[:, :2],
            Purpose.RESIDUAL: smallest,
            Purpose.TARGET: smallest,
        }
        outcome = BLOCK.verify(Distribution.dense(p), proposal, Scripted(script))  # type: ignore[arg-type]
        assert (outcome.accepted.tolist(), outcome.next_token.tolist()) == ([0], [1])


def test_a_good_sequel_saves_a_doubtful_token() -> None:
    """A first token that its own coin refuses is accepted when the second one passes."""
    # p_1 = .5; then the second token doubles the ratio: p_2 = 1.
    p = Distribution.dense(table([0.4, 0.6], [0.8, 0.2], [0.5, 0.5])[None])
    proposal = Proposal.chains(
        torch.tensor([[0, 0]]), [2], Distribution.dense(table([0.8, 0.2], [0.4, 0.6])[None])
    )
    coins = torch.tensor([[0.9, 0.9]], dtype=torch.float64)
    assert TOKEN.decide(p, proposal, coins)[0].tolist() == [0]
    assert BLOCK.decide(p, proposal, BLOCK.joint(p, proposal), coins)[0].tolist() == [2]


@given(tables())
@settings(max_examples=30, deadline=None)
def test_what_exceeds_the_draft_is_the_same_in_all_forms(case: tuple[Tensor, Tensor, int]) -> None:
    """The sum of max(scale p - q, 0) agrees for certain laws in dense and in point form."""
    p, q, _ = case
    scale = torch.rand(p.shape[:-1], generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    sure_p, sure_q = p.argmax(-1), q.argmax(-1)
    forms = {
        "p": [Distribution.dense(p)],
        "certain p": [Distribution.dense(torch.nn.functional.one_hot(sure_p, p.shape[-1]).double())],
        "q": [Distribution.dense(q)],
        "certain q": [Distribution.dense(torch.nn.functional.one_hot(sure_q, p.shape[-1]).double())],
    }
    forms["certain p"].append(Distribution.point(sure_p))
    forms["certain q"].append(Distribution.point(sure_q))
    for one, other in itertools.product(("p", "certain p"), ("q", "certain q")):
        found = [excess(a, b, scale) for a in forms[one] for b in forms[other]]
        expected = scale[..., None] * forms[one][0].probs - forms[other][0].probs  # type: ignore[operator]
        for value in found:
            torch.testing.assert_close(value, expected.clamp(min=0).sum(-1), rtol=0, atol=1e-14)
