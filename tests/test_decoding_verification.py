"""The lossless rules on chains, held against exact laws: all they can do is added up, nothing is sampled.

Trees, block verification and the lossy rules have files of their own, `test_rules_*.py`.
"""

from __future__ import annotations

import typing

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from specbench.audit.faults.residual_from_p import ResidualFromP
from specbench.decoding.distribution import Distribution, residual
from specbench.decoding.processing import SamplingTensors, process
from specbench.decoding.random_numbers import Purpose, RoundRandom, stream_keys
from specbench.decoding.verification import (
    RULES,
    BlockVerification,
    ExactMatch,
    Proposal,
    RejectionSampling,
    Rule,
    RuleName,
)
from specbench.records import Request, SamplingParams
from tests.tables import Scripted, table, tables
from tests.toy import (
    Toy,
    chain_rounds,
    decode,
    emitted_law,
    histories,
    just_above,
    just_below,
    number_of,
    ordinary_law,
    round_law,
    total_variation,
)

EXACT = 1e-12

REJECTION = RejectionSampling()


def chain(tokens: list[int], q: Tensor) -> Proposal:
    """Offer one chain drawn from the rows of q."""
    return Proposal.chains(torch.tensor([tokens]), [len(tokens)], Distribution.dense(q[None]))


def coins(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


# Losslessness


@given(tables())
@settings(max_examples=200, deadline=None)
def test_rejection_sampling_emits_the_targets_law(case: tuple[Tensor, Tensor, int]) -> None:
    """Over several rounds and cut in mid-round, whole continuations have exactly the target's law."""
    p, q, k = case
    horizon = k + 3
    emitted = emitted_law(REJECTION, p, q, k, horizon)
    torch.testing.assert_close(emitted, ordinary_law(p, horizon), rtol=0, atol=EXACT)


@given(tables())
@settings(max_examples=100, deadline=None)
def test_a_draft_token_is_kept_up_to_the_edge_and_not_beyond(case: tuple[Tensor, Tensor, int]) -> None:
    """The decision flips at a coin of min(1, p / q), for every token that the draft can draw."""
    p, q, _ = case
    vocab = p.shape[-1]
    contexts = histories(vocab, 1)
    drafts = contexts[:, 2:]
    p_draft, q_draft = (x[contexts[:, 0], contexts[:, 1], contexts[:, 2]] for x in (p, q))
    drawable = q_draft > 0
    keep = (p_draft / q_draft)[drawable].clamp(max=1.0)
    p_rows = p[contexts[:, :1], contexts[:, 1:2]][drawable]
    target = Distribution.dense(torch.cat([p_rows, p_rows], 1))
    law = Distribution.dense(q[contexts[:, :1], contexts[:, 1:2]][drawable])
    proposal = Proposal.chains(drafts[drawable], [1] * int(drawable.sum()), law)
    below, _ = REJECTION.decide(target, proposal, just_below(keep)[:, None])
    above, _ = REJECTION.decide(target, proposal, just_above(keep)[:, None])
    assert torch.equal(below == 1, keep > 0)
    assert torch.equal(above == 1, keep == 1)


@given(tables())
@settings(max_examples=50, deadline=None)
def test_a_point_mass_means_the_same_in_both_forms(case: tuple[Tensor, Tensor, int]) -> None:
    """A draft that is certain of its tokens is judged alike whether q is dense or a point mass."""
    p, q, k = case
    certain = torch.zeros_like(q).scatter(-1, q.argmax(-1, keepdim=True), 1.0)
    dense = round_law(REJECTION, p, certain, k)
    points = round_law(REJECTION, p, certain, k, form="point")
    for one, other in zip(dense, points, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def exact_match_rounds(p: Tensor, q: Tensor, k: int) -> list[Tensor]:
    """Return the law of what a round of exact match emits, by way of every sample of the target's rows."""
    vocab = p.shape[-1]
    # Context, draft tokens, and what the target samples at each of the k + 1 rows.
    everything = histories(vocab, 2 * k + 1)
    tokens, samples = everything[:, : 2 + k], everything[:, 2 + k :]
    p_rows = p[tokens[:, :-1], tokens[:, 1:]]
    q_rows = q[tokens[:, :-1], tokens[:, 1:]][:, :k]
    p_sampled = p_rows.gather(-1, samples[..., None]).squeeze(-1)
    q_draft = q_rows.gather(-1, tokens[:, 2:, None]).squeeze(-1)
    weight = p_sampled.prod(1) * q_draft.prod(1)
    # The middle of a token's stretch of the inverse CDF draws it.
    middle = (p_rows.cumsum(-1) - p_rows / 2).gather(-1, samples[..., None]).squeeze(-1)
    possible = weight > 0
    tokens, weight = tokens[possible], weight[possible]
    proposal = Proposal.chains(tokens[:, 2:], [k] * len(tokens), Distribution.dense(q_rows[possible]))
    numbers = Scripted({Purpose.TARGET: middle[possible]})
    outcome = ExactMatch().verify(Distribution.dense(p_rows[possible]), proposal, numbers)  # type: ignore[arg-type]
    emitted = []
    for n in range(k + 1):
        here = outcome.accepted == n
        run = torch.cat([tokens[here, : 2 + n], outcome.next_token[here, None]], 1)
        law = torch.zeros(vocab ** (3 + n), dtype=torch.float64)
        emitted.append(law.index_add(0, number_of(run, vocab), weight[here]).reshape(vocab**2, -1))
    return emitted


@given(tables(most=3))
@settings(max_examples=60, deadline=None)
def test_exact_match_emits_the_targets_law(case: tuple[Tensor, Tensor, int]) -> None:
    """Over several rounds and cut in mid-round, whole continuations have exactly the target's law."""
    p, q, k = case
    emitted = chain_rounds(exact_match_rounds(p, q, k), k + 3)
    torch.testing.assert_close(emitted, ordinary_law(p, k + 3), rtol=0, atol=EXACT)


def test_a_row_out_of_place_would_show() -> None:
    """On a table whose rows differ, a target read one row late changes the law of continuations."""

    class RowBefore(RejectionSampling):
        def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
            assert p.probs is not None
            return super().decide(Distribution.dense(p.probs.roll(1, dims=1)), proposal, coins)

    toy = Toy.random(4, seed=11)
    draft = toy.blurred(1.0, seed=12)
    late = emitted_law(RowBefore(), toy.probs, draft.probs, 3, 6)
    assert (total_variation(late, ordinary_law(toy.probs, 6)) > 0.1).all()


# The values of METRICS.md


def test_after_five_tokens_rows_four_to_six_judge_three_drafts_and_row_seven_gives_the_bonus() -> None:
    """With a prefix of 5 and k = 3, rows 4, 5 and 6 judge the drafts and row 7 gives the bonus."""
    prefix, drafts, vocab = [0, 1, 2, 3, 4], [5, 6, 7], 8
    # A model whose logits at index i are certain of token i + 1: only the right row accepts each draft.
    at_index = torch.full((len(prefix) + len(drafts), vocab + 1), -torch.inf, dtype=torch.float64)
    for index in range(len(at_index)):
        at_index[index, index + 1] = 0.0
    sampling = SamplingTensors.of([SamplingParams()])
    p = process(at_index[None, 4:8], sampling)
    proposal = chain(drafts, torch.full((3, vocab + 1), 1 / (vocab + 1), dtype=torch.float64))
    random = RoundRandom(stream_keys([0]), torch.tensor([0]), torch.tensor([0]))
    for rule in (RejectionSampling(), ExactMatch()):
        outcome = rule.verify(p, proposal, random)
        assert (outcome.accepted.tolist(), outcome.next_token.tolist()) == ([3], [8])
        assert not outcome.rejected.any()
        assert outcome.path.tolist() == [[0, 1, 2]]


def first_token(rule: RejectionSampling) -> float:
    """Return the probability of token 0 in one round with p = [.4, .6] and q = [.8, .2]."""
    p, q = table([0.4, 0.6]), table([0.8, 0.2])
    emitted = emitted_law(rule, p.expand(2, 2, 2), q.expand(2, 2, 2), 1, 1)
    return float(emitted[0, 0])


def test_the_residual_restores_the_target() -> None:
    """With p = [.4, .6] and q = [.8, .2] token 0 comes with probability .4."""
    assert first_token(REJECTION) == pytest.approx(0.4, abs=EXACT)


def test_resampling_from_p_would_not() -> None:
    """Resampling from p after a rejection would make it .56."""
    assert first_token(ResidualFromP()) == pytest.approx(0.56, abs=EXACT)


def test_a_draft_of_eight_tenths_and_a_target_of_six_accept_three_quarters() -> None:
    """Draft .8, target .6: the edge of acceptance is a coin of .75."""
    p, proposal = Distribution.dense(table([0.6, 0.4], [0.5, 0.5])[None]), chain([0], table([0.8, 0.2]))
    accepted = [int(REJECTION.decide(p, proposal, coins(c))[0]) for c in (0.75 - 1e-12, 0.75 + 1e-12)]
    assert accepted == [1, 0]


# Single rounds


def test_a_rejection_ends_the_run() -> None:
    """What follows a rejected token is dropped, even where its own coin would have kept it."""
    half = table([0.5, 0.5], [0.1, 0.9], [0.5, 0.5], [0.5, 0.5])
    proposal = chain([0, 0, 0], table([0.5, 0.5], [0.9, 0.1], [0.5, 0.5]))
    accepted, rejected = REJECTION.decide(Distribution.dense(half[None]), proposal, coins(0.5, 0.5, 0.5))
    assert (accepted.tolist(), rejected.tolist()) == ([1], [True])


def test_exact_match_ends_the_run_where_it_disagrees() -> None:
    """What follows a mismatch is dropped, even where the target's sample agrees with it again."""
    sampled = Distribution.point(torch.tensor([[1, 2, 3, 4]]))
    outcome = ExactMatch().verify(sampled, Proposal.certain([[1, 0, 3]]), RoundRandom(*[torch.zeros(0)] * 3))
    assert (outcome.accepted.tolist(), outcome.next_token.tolist()) == ([1], [2])
    assert outcome.rejected.all()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_recovered_and_bonus_tokens_are_told_apart(rule: type[Rule]) -> None:
    """`rejected` says that an offered token was refused; after full acceptance it is False."""
    p = Distribution.point(torch.tensor([[1, 2], [1, 2]]))
    random = RoundRandom(stream_keys([0, 1]), torch.zeros(2, dtype=torch.int64), torch.zeros(2).long())
    outcome = rule().verify(p, Proposal.certain([[1], [0]]), random)
    assert outcome.rejected.tolist() == [False, True]
    assert outcome.accepted.tolist() == [1, 0]
    assert outcome.next_token.tolist() == [2, 1]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_ragged_batch_offers_each_row_its_own_count(rule: type[Rule]) -> None:
    """Tokens beyond a row's count are neither accepted nor rejected; its bonus follows its last one."""
    p = Distribution.point(torch.tensor([[1, 2, 3, 4]] * 4))
    chains = torch.tensor([[1, 2, 3]] * 4)
    proposal = Proposal.chains(chains, [0, 1, 2, 3], Distribution.point(chains))
    random = RoundRandom(stream_keys([0] * 4), torch.zeros(4).long(), torch.zeros(4).long())
    outcome = rule().verify(p, proposal, random)
    assert outcome.accepted.tolist() == [0, 1, 2, 3]
    assert outcome.next_token.tolist() == [1, 2, 3, 4]
    assert not outcome.rejected.any()


def test_what_is_not_offered_has_no_say_in_the_bonus() -> None:
    """The bonus of a short row comes from p, whatever q holds in the places beyond its count."""
    p = table([0.5, 0.5], [0.3, 0.7], [0.5, 0.5])[None]
    q = torch.tensor([[[0.5, 0.5], [torch.nan, torch.nan]]], dtype=torch.float64)
    proposal = Proposal.chains(torch.tensor([[0, 0]]), [1], Distribution.dense(q))
    accepted, rejected = REJECTION.decide(Distribution.dense(p), proposal, coins(0.5, 0.5))
    law = REJECTION.next_law(Distribution.dense(p), proposal, accepted, rejected)
    assert law.probs is not None
    assert torch.equal(law.probs, p[:, 1])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_with_nothing_offered_the_next_token_is_the_targets(rule: type[Rule]) -> None:
    """An empty proposal is ordinary decoding: nothing accepted or rejected, one token drawn from p."""
    p = Distribution.dense(table([0.2, 0.5, 0.3])[None])
    random = RoundRandom(stream_keys([7]), torch.tensor([4]), torch.tensor([2]))
    outcome = rule().verify(p, Proposal.empty(1), random)
    by_round = rule in (RejectionSampling, BlockVerification)
    number = random.uniform(Purpose.TARGET, 1, by_round=by_round)
    assert (outcome.accepted.tolist(), outcome.rejected.tolist()) == ([0], [False])
    assert outcome.next_token.tolist() == p.sample(number)[0].tolist()


def test_every_rule_has_its_name() -> None:
    """The names that strategies offer, the table of rules and the rules' own names are the same."""
    assert typing.get_args(RuleName) == tuple(RULES)
    assert [rule.name for rule in RULES.values()] == list(RULES)
    assert [name for name, rule in RULES.items() if not rule.lossless] == ["typical", "threshold", "top-k"]


@pytest.mark.parametrize("rule", [r for n, r in RULES.items() if n not in ("rejection", "exact")])
def test_a_tree_is_refused(rule: type[Rule]) -> None:
    """Rules for chains raise ValueError on a tree instead of misreading it."""
    tokens = torch.tensor([[0, 1]])
    tree = Proposal(tokens, torch.tensor([2]), [2], Distribution.point(tokens), torch.tensor([[-1, -1]]))
    random = RoundRandom(stream_keys([0]), torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(ValueError, match="tree"):
        rule().verify(Distribution.point(torch.zeros(1, 3).long()), tree, random)


# Edges of arithmetic


def test_a_rejection_that_rounding_made_possible_still_gives_a_token_of_p() -> None:
    """In float32, with p and q equal up to rounding, whatever is recovered lies in p's support."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 50, generator=generator)
    logits[:, ::5] = -torch.inf
    p = logits.softmax(-1)
    for q in (
        p,
        (logits + 1e-7).softmax(-1),
        (logits * (1 + 1e-7)).softmax(-1),
        (logits.double()).softmax(-1),
    ):
        law = residual(Distribution.dense(p), Distribution.dense(q.to(p.dtype)))
        for uniform in (2.0**-53, 0.5, 1 - 2.0**-53):
            tokens = law.sample(torch.full((200,), uniform, dtype=torch.float64))
            assert (p.gather(1, tokens[:, None]) > 0).all()


def test_an_empty_residual_is_p() -> None:
    """Where nothing is left of p - q, the recovered token comes from p."""
    p = torch.tensor([[0.25, 0.75]])
    law = residual(Distribution.dense(p), Distribution.dense(p.clone()))
    assert law.probs is not None
    assert torch.equal(law.probs, p)
    certain = torch.tensor([[0.0, 1.0]])
    law = residual(Distribution.dense(certain), Distribution.point(torch.tensor([1])))
    assert law.probs is not None
    assert torch.equal(law.probs, certain)


@given(tables())
@settings(max_examples=50, deadline=None)
def test_an_impossible_token_is_never_emitted(case: tuple[Tensor, Tensor, int]) -> None:
    """What the target gives probability 0 comes with exactly 0, however much the draft likes it."""
    p, q, k = case
    impossible = ordinary_law(p, k + 2) == 0
    assert (emitted_law(REJECTION, p, q, k, k + 2)[impossible] == 0).all()


def test_the_smallest_coin_does_not_accept_an_impossible_token() -> None:
    """With p = 0 even the smallest uniform rejects, whatever q; the largest one keeps a token with p = q."""
    p = Distribution.dense(table([0.0, 1.0], [0.5, 0.5])[None])
    proposal = chain([0], table([1e-12, 1 - 1e-12]))
    assert REJECTION.decide(p, proposal, coins(2.0**-53))[0].tolist() == [0]
    unlikely = chain([0], table([0.0, 1.0]))
    assert REJECTION.decide(p, unlikely, coins(2.0**-53))[0].tolist() == [0]
    equal = chain([1], table([0.0, 1.0]))
    assert REJECTION.decide(p, equal, coins(1 - 2.0**-53))[0].tolist() == [1]


# What depends on what


def test_every_decision_has_a_number_of_its_own() -> None:
    """Recovered tokens read RESIDUAL only, bonus tokens TARGET only, and each at its own position."""
    toy = Toy.random(4, seed=5)
    batch, k = 400, 3
    numbers = torch.Generator().manual_seed(6)
    contexts = torch.randint(4, (batch, 2 + k), generator=numbers)
    p = Distribution.dense(toy.after(contexts).softmax(-1))
    q = Distribution.dense(toy.blurred(0.8, seed=7).after(contexts).softmax(-1)[:, :k])
    proposal = Proposal.chains(contexts[:, 2:], [k] * batch, q)

    def fresh(width: int) -> Tensor:
        return torch.rand(batch, width, generator=numbers, dtype=torch.float64)

    script = {Purpose.COIN: fresh(k), Purpose.RESIDUAL: fresh(k + 1), Purpose.TARGET: fresh(k + 1)}
    outcome = REJECTION.verify(p, proposal, Scripted(script))  # type: ignore[arg-type]
    recovered = outcome.rejected
    assert 0.2 < recovered.double().mean() < 0.9

    def changed_by(purpose: Purpose, where: Tensor) -> Tensor:
        other = dict(script)
        other[purpose] = torch.where(where, fresh(where.shape[1]), script[purpose])
        again = REJECTION.verify(p, proposal, Scripted(other))  # type: ignore[arg-type]
        return (again.accepted != outcome.accepted) | (again.next_token != outcome.next_token)

    place = torch.arange(k + 1)
    here = place == outcome.accepted[:, None]
    assert not changed_by(Purpose.RESIDUAL, ~here).any()
    assert not changed_by(Purpose.TARGET, ~here).any()
    assert not changed_by(Purpose.COIN, place[:k] > outcome.accepted[:, None]).any()
    assert torch.equal(changed_by(Purpose.RESIDUAL, here) & ~recovered, torch.zeros_like(recovered))
    assert torch.equal(changed_by(Purpose.TARGET, here) & recovered, torch.zeros_like(recovered))
    assert changed_by(Purpose.RESIDUAL, here)[recovered].double().mean() > 0.2
    assert changed_by(Purpose.TARGET, here)[~recovered].double().mean() > 0.2
    # Rejected on the coin of one position, the token is not drawn with a number of another.
    assert changed_by(Purpose.COIN, place[:k] == outcome.accepted[:, None])[recovered].any()


def test_only_rejection_sampling_decides_a_position_anew_in_each_round() -> None:
    """In another round rejection sampling reads other numbers for a position; exact match the same ones."""
    batch = 400
    p = Distribution.dense(table([0.4, 0.3, 0.3], [0.2, 0.3, 0.5]).expand(batch, -1, -1))
    q = Distribution.dense(table([0.8, 0.1, 0.1]).expand(batch, -1, -1))
    proposal = Proposal.chains(torch.zeros(batch, 1).long(), [1] * batch, q)
    random = RoundRandom(stream_keys([8] * batch), torch.full((batch,), 5), torch.arange(batch))
    outcome = REJECTION.verify(p, proposal, random)
    for kind in (outcome.rejected, ~outcome.rejected):
        assert kind.double().mean() > 0.4
        assert len(set(outcome.next_token[kind].tolist())) > 1
    same = ExactMatch().verify(p, proposal, random)
    assert len(set(same.accepted.tolist())) == len(set(same.next_token.tolist())) == 1


def requests_of_a_mixed_batch() -> list[Request]:
    settings = [
        SamplingParams(seed=1, max_new_tokens=20),
        SamplingParams(seed=2, max_new_tokens=5, temperature=0.0),
        SamplingParams(seed=3, max_new_tokens=30, temperature=0.7, top_k=2),
        SamplingParams(seed=-4, max_new_tokens=17, top_p=0.8),
        SamplingParams(seed=5, max_new_tokens=1),
        SamplingParams(seed=6, max_new_tokens=25, min_p=0.3),
        SamplingParams(seed=7, max_new_tokens=25, temperature=0.0),
    ]
    return [Request(i, (i % 4, i // 4), sampling) for i, sampling in enumerate(settings)]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_request_does_not_notice_its_neighbours(rule: type[Rule]) -> None:
    """A request's output is the same alone, in any row, and in a batch of any size and width."""
    toy = Toy.random(4, seed=21)
    toy.logits[..., 3] -= 2  # end-of-sequence: some rows end early, most do not
    draft = toy.blurred(0.7, seed=22)
    requests, lengths = requests_of_a_mixed_batch(), [3, 2, 1, 0, 3, 2, 1]
    eos = frozenset({3})
    together = decode(toy, draft, rule(), requests, lengths, eos)
    alone = [
        decode(toy, draft, rule(), [request], k, eos)[0] for request, k in zip(requests, lengths, strict=True)
    ]
    turned = decode(toy, draft, rule(), requests[::-1], lengths[::-1], eos)[::-1]
    doubled = decode(toy, draft, rule(), requests[2:] + requests, lengths[2:] + lengths, eos)[5:]
    assert together == alone == turned == doubled
    assert sum(accepted for output in together for _, accepted in output.rounds) > 5


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("noise", [0.0, 0.7, 5.0])
def test_under_one_seed_exact_match_is_ordinary_decoding(k: int, noise: float) -> None:
    """Whatever the draft and its length, exact match emits the very tokens of ordinary decoding."""
    toy = Toy.random(4, seed=31)
    draft = toy.blurred(noise, seed=32)
    requests = [Request(i, (0, 1), SamplingParams(seed=i, max_new_tokens=20)) for i in range(50)]
    requests += requests_of_a_mixed_batch()
    speculative = decode(toy, draft, ExactMatch(), requests, k, frozenset({2}))
    ordinary = decode(toy, draft, ExactMatch(), requests, 0, frozenset({2}))
    assert [(o.tokens, o.ended_by) for o in speculative] == [(o.tokens, o.ended_by) for o in ordinary]
    assert sum(len(o.rounds) for o in speculative) < sum(len(o.rounds) for o in ordinary)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_temperature_zero_is_greedy_decoding(rule: type[Rule]) -> None:
    """At temperature 0 the output is the target's most likely token each time, whatever the draft."""
    toy = Toy.random(5, seed=41)
    request = Request(0, (0, 1), SamplingParams(temperature=0.0, max_new_tokens=12))
    expected = [0, 1]
    for _ in range(12):
        expected.append(int(toy.logits[expected[-2], expected[-1]].argmax()))
    for noise in (0.0, 1.0, 10.0):
        output = decode(toy, toy.blurred(noise, seed=42), rule(), [request], 3)[0]
        assert list(output.tokens) == expected[2:]
