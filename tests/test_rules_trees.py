"""Trees under rejection sampling and exact match, against exact laws, chains, and ordinary decoding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from specbench import stats
from specbench.audit.chi_squared import ChiSquaredResult, judge
from specbench.audit.faults.accept_all import AcceptAll
from specbench.audit.faults.residual_from_p import ResidualFromP
from specbench.decoding.distribution import Distribution
from specbench.decoding.random_numbers import Purpose, RoundRandom, stream_keys
from specbench.decoding.verification import ExactMatch, Proposal, RejectionSampling, Rule
from specbench.records import Request, SamplingParams
from tests.tables import Scripted, laws, table
from tests.toy import (
    Toy,
    chain_rounds,
    decode,
    histories,
    number_of,
    ordinary_law,
    round_law,
    total_variation,
)
from tests.tree_toy import SHAPES, Draw, contexts, decode_trees, depth_of, node_law, tree_rounds

EXACT = 1e-12
REJECTION = RejectionSampling()
DRAWS_OF_SIBLINGS: tuple[Draw, ...] = ("without replacement", "with replacement", "certain")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def numbers(batch: int, position: int = 0) -> RoundRandom:
    """Return the random numbers of a first round, one seed per row."""
    return RoundRandom(stream_keys(range(batch)), torch.full((batch,), position), torch.zeros(batch).long())


# Rejection sampling: losslessness


@st.composite
def targets_and_drafts(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Draw tables `[3, 3, 3]`: a target with zeros and point masses, a draft that can fill any tree here."""
    everything = [0, 1, 2]
    targets = [draw(laws(3, everything)) for _ in range(4)]
    drafts = [
        [w / sum(row) for w in row]
        for row in draw(st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=3, max_size=3))
    ]
    drafts.append(drafts[0])
    targets[0] = drafts[0] if draw(st.booleans()) else targets[0]
    picks = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=9, max_size=9))).reshape(3, 3)
    return table(*targets)[picks], table(*drafts)[picks]


@pytest.mark.parametrize("draw", DRAWS_OF_SIBLINGS)
@given(targets_and_drafts())
@settings(max_examples=20, deadline=None)
def test_rejection_sampling_of_trees_emits_the_targets_law(draw: Draw, case: tuple[Tensor, Tensor]) -> None:
    """Whole continuations over several rounds have the target's law, for every shape, in one ragged batch."""
    p, q = case
    emitted = tree_rounds(REJECTION, p, q, list(SHAPES.values()), draw)
    for shape, rounds in zip(SHAPES.values(), emitted, strict=True):
        horizon = depth_of(shape) + 2
        law = chain_rounds(rounds, horizon)
        torch.testing.assert_close(law, ordinary_law(p, horizon), rtol=0, atol=EXACT)


def test_siblings_of_four_tokens() -> None:
    """With four tokens three of which are offered, a refused sibling leaves a law of two others."""
    toy = Toy.random(4, seed=3)
    draft = toy.blurred(1.5, seed=4)
    [rounds] = tree_rounds(REJECTION, toy.probs, draft.probs, [[-1, -1, -1, 1]])
    torch.testing.assert_close(chain_rounds(rounds, 4), ordinary_law(toy.probs, 4), rtol=0, atol=EXACT)


@given(targets_and_drafts())
@settings(max_examples=5, deadline=None)
@pytest.mark.parametrize("draw", DRAWS_OF_SIBLINGS)
def test_a_certain_target_means_the_same_in_both_forms(draw: Draw, case: tuple[Tensor, Tensor]) -> None:
    """At temperature 0 the walk is the same whether p is dense or a point mass."""
    p, q = case
    certain = torch.zeros_like(p).scatter(-1, p.argmax(-1, keepdim=True), 1.0)
    shapes = [SHAPES["depth first"], SHAPES["siblings"]]
    dense = tree_rounds(REJECTION, certain, q, shapes, draw)
    points = tree_rounds(REJECTION, certain, q, shapes, draw, p_is_point=True)
    for one, other in zip(itertools.chain(*dense), itertools.chain(*points), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=EXACT)


def test_a_wrong_law_of_the_siblings_would_show() -> None:
    """Judged as if drawn with replacement, siblings drawn without it move the law of continuations."""

    class Forgetful(RejectionSampling):
        def decide(self, p: Distribution, proposal: Proposal, coins: Tensor) -> tuple[Tensor, Tensor]:
            q = Distribution.dense(draft.probs[0, 1].expand(len(coins), 1, -1))
            return super().decide(p, Proposal(proposal.tokens, proposal.counts, [], q), coins)

    toy = Toy.random(3, seed=5)
    draft = Toy(toy.blurred(1.0, seed=6).logits[:1, 1:2].expand(3, 3, 3))
    shape = [[-1, -1]]
    [right] = tree_rounds(REJECTION, toy.probs, draft.probs, shape)
    [wrong] = tree_rounds(Forgetful(), toy.probs, draft.probs, shape)
    law = ordinary_law(toy.probs, 3)
    assert (total_variation(chain_rounds(right, 3), law) < EXACT).all()
    assert (total_variation(chain_rounds(wrong, 3), law) > 0.01).all()


def accepted_tokens(rounds: list[Tensor]) -> Tensor:
    """Return the expected number of accepted tokens in every context, `[V * V]`."""
    return sum((n * law.sum(1) for n, law in enumerate(rounds)), torch.zeros(1).double())


def test_more_branches_accept_more() -> None:
    """A chain of 3 with alternatives at each depth accepts more of its tokens than the chain alone."""
    toy = Toy.random(3, seed=7)
    draft = toy.blurred(1.0, seed=8)
    chain, bushy = tree_rounds(REJECTION, toy.probs, draft.probs, [[-1, 0, 1], [-1, 0, 1, -1, 0, 1]])
    assert (accepted_tokens(bushy) > accepted_tokens(chain) + 0.05).all()


# A tree without branches is a chain


@pytest.mark.parametrize("rule", [RejectionSampling(), ExactMatch()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("form", ["dense", "points", "target certain", "draft certain"])
def test_a_tree_without_branches_is_judged_as_a_chain(rule: Rule, form: str) -> None:
    """Under the same numbers a chain and the tree of its shape give the same run and the same next token."""
    batch, num, vocab = 3000, 4, 5
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(batch, num + 1, vocab, generator=generator)
    p = logits.softmax(-1)
    q = (logits[:, :num] + torch.randn(batch, num, vocab, generator=generator)).softmax(-1)
    tokens = Distribution.dense(q).sample(torch.rand(batch, num, generator=generator, dtype=torch.float64))
    target, draft = Distribution.dense(p), Distribution.dense(q)
    if form in ("points", "target certain"):
        target = Distribution.point(p.argmax(-1))
    if form in ("points", "draft certain"):
        draft = Distribution.point(tokens)
    offered = torch.randint(num + 1, (batch,), generator=generator).tolist()
    parents = torch.arange(-1, num - 1).expand(batch, -1)
    chain = rule.verify(target, Proposal.chains(tokens, offered, draft), numbers(batch, position=3))
    tree = rule.verify(target, Proposal.trees(tokens, parents, offered, draft), numbers(batch, position=3))
    assert torch.equal(tree.accepted, chain.accepted)
    assert torch.equal(tree.next_token, chain.next_token)
    assert torch.equal(tree.rejected, chain.rejected)
    on_the_way = torch.arange(num) < chain.accepted[:, None]
    assert torch.equal(tree.path[on_the_way], chain.path[on_the_way])
    assert len(set(chain.accepted.tolist())) == num + 1


@given(targets_and_drafts())
@settings(max_examples=10, deadline=None)
def test_the_law_of_a_tree_without_branches_is_that_of_a_chain(case: tuple[Tensor, Tensor]) -> None:
    """The law of what one round emits agrees with the chain's, run by run."""
    p, q = case
    [tree] = tree_rounds(REJECTION, p, q, [[-1, 0, 1]])
    for one, other in zip(tree, round_law(REJECTION, p, q, 3), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=EXACT)


# Single rounds


BRANCHES = Proposal.certain_trees([[1, 2, 3, 4, 5]], [[-1, -1, 1, 1, 3]])
"""Roots 1 and 2; below 2 the tokens 3 and 4; below 4 the token 5."""


@pytest.mark.parametrize("rule", [RejectionSampling(), ExactMatch()], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    ("rows", "path", "next_token", "rejected"),
    [
        ([2, 0, 4, 0, 5, 7], [1, 3, 4], 7, False),  # down to the leaf, and the bonus of its row
        ([2, 0, 4, 0, 6, 7], [1, 3], 6, True),  # the last child refused
        ([2, 0, 9, 0, 0, 0], [1], 9, True),  # both children refused
        ([9, 0, 0, 0, 0, 0], [], 9, True),  # both roots refused
        ([1, 8, 0, 0, 0, 0], [0], 8, False),  # a leaf has no children to refuse
    ],
)
def test_the_walk_follows_the_target(
    rule: Rule, rows: list[int], path: list[int], next_token: int, rejected: bool
) -> None:
    """A certain target leads the walk along its own tokens; the next one comes from the row it ends on."""
    outcome = rule.verify(Distribution.point(torch.tensor([rows])), BRANCHES, numbers(1))
    assert outcome.accepted.tolist() == [len(path)]
    assert outcome.path[0, : len(path)].tolist() == path
    assert outcome.next_token.tolist() == [next_token]
    assert outcome.rejected.tolist() == [rejected]


@pytest.mark.parametrize("rule", [RejectionSampling(), ExactMatch()], ids=lambda rule: rule.name)
def test_only_what_is_offered_is_walked(rule: Rule) -> None:
    """Nodes beyond a row's count are no nodes, whatever their parents say, down to a count of 0."""
    nodes = torch.tensor([[1, 2, 3]] * 4)
    parents = torch.tensor([[-1, 0, 1], [-1, 0, 2], [-1, 7, -9], [-1, -1, -1]])
    proposal = Proposal.trees(nodes, parents, [3, 2, 1, 0], Distribution.point(nodes))
    outcome = rule.verify(Distribution.point(torch.tensor([[1, 2, 3, 4]] * 4)), proposal, numbers(4))
    assert outcome.accepted.tolist() == [3, 2, 1, 0]
    assert outcome.next_token.tolist() == [4, 3, 2, 1]
    assert not outcome.rejected.any()


@pytest.mark.parametrize("rule", [RejectionSampling(), ExactMatch()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_a_tree_of_nothing_is_ordinary_decoding(rule: Rule, batch: int) -> None:
    """With N = 0 nothing is accepted or refused, and the next token is that of an empty chain."""
    p = Distribution.dense(table([0.2, 0.5, 0.3]).expand(batch, 1, 3))
    nothing = torch.zeros(batch, 0, dtype=torch.int64)
    tree = Proposal.trees(nothing, nothing, [0] * batch, Distribution.point(nothing))
    outcome = rule.verify(p, tree, numbers(batch, position=5))
    chain = rule.verify(p, Proposal.empty(batch), numbers(batch, position=5))
    assert torch.equal(outcome.next_token, chain.next_token)
    assert outcome.accepted.tolist() == [0] * batch
    assert outcome.path.shape == (batch, 0)
    assert not outcome.rejected.any()


def test_a_refused_sibling_is_never_recovered() -> None:
    """With q a point mass the recovered token is none of the children that were refused."""
    batch = 2000
    p = Distribution.dense(table([0.1, 0.2, 0.3, 0.4]).expand(batch, 4, 4))
    nodes = torch.tensor([[3, 2, 1]]).expand(batch, -1)
    parents = torch.full((batch, 3), -1)
    tree = Proposal.trees(nodes, parents, [3] * batch, Distribution.point(nodes))
    outcome = REJECTION.verify(p, tree, numbers(batch))
    assert (outcome.next_token[outcome.rejected] == 0).all()
    # Refused are all three with probability .1: 200 of 2000, give or take 5 standard deviations of 13.4.
    assert 133 < int(outcome.rejected.sum()) < 267


def test_each_decision_reads_its_own_number() -> None:
    """A coin decides about its node alone; recovered and bonus tokens read the number at their depth."""
    batch, vocab = 500, 4
    toy = Toy.random(vocab, seed=10)
    generator = torch.Generator().manual_seed(11)
    parents = torch.tensor(SHAPES["depth first"]).expand(batch, -1)
    num = parents.shape[1]
    last_two = torch.randint(vocab, (batch, 2), generator=generator)
    tokens, laws_of_nodes = torch.zeros(batch, num, dtype=torch.int64), []
    for i in range(num):
        law = node_law(toy.blurred(1.0, seed=12).probs, last_two, tokens, parents, i, "without replacement")
        laws_of_nodes.append(law)
        tokens[:, i] = Distribution.dense(law).sample(
            torch.rand(batch, generator=generator, dtype=torch.float64)
        )
    p = Distribution.dense(toy.probs[tuple(contexts(last_two, tokens, parents).unbind(-1))])
    q = Distribution.dense(torch.stack(laws_of_nodes, 1))
    tree = Proposal.trees(tokens, parents, [num] * batch, q)

    def fresh(width: int) -> Tensor:
        return torch.rand(batch, width, generator=generator, dtype=torch.float64)

    script = {Purpose.COIN: fresh(num), Purpose.RESIDUAL: fresh(num + 1), Purpose.TARGET: fresh(num + 1)}
    outcome = REJECTION.verify(p, tree, Scripted(script))  # type: ignore[arg-type]
    assert 0.1 < outcome.rejected.double().mean() < 0.9

    def changed_by(purpose: Purpose, where: Tensor) -> Tensor:
        other = dict(script)
        other[purpose] = torch.where(where, fresh(where.shape[-1]), script[purpose])
        again = REJECTION.verify(p, tree, Scripted(other))  # type: ignore[arg-type]
        return (again.accepted != outcome.accepted) | (again.next_token != outcome.next_token)

    here = torch.arange(num + 1) == outcome.accepted[:, None]
    assert not changed_by(Purpose.RESIDUAL, ~here).any()
    assert not changed_by(Purpose.TARGET, ~here).any()
    assert not changed_by(Purpose.RESIDUAL, here)[~outcome.rejected].any()
    assert not changed_by(Purpose.TARGET, here)[outcome.rejected].any()
    assert changed_by(Purpose.RESIDUAL, here)[outcome.rejected].double().mean() > 0.1
    assert changed_by(Purpose.TARGET, here)[~outcome.rejected].double().mean() > 0.2
    # Where the first root was kept, the second one and what is below it had no say.
    kept = (outcome.accepted > 0) & (outcome.path[:, 0] == 0)
    assert not changed_by(Purpose.COIN, torch.arange(num) >= 3)[kept].any()
    assert changed_by(Purpose.COIN, torch.arange(num) == 0)[kept].double().mean() > 0.1


# Exact match


def exact_match_tree_rounds(p: Tensor, q: Tensor, shape: list[int], strata: int) -> list[Tensor]:
    """Return the law of what a round of exact match emits, for laws in multiples of 1 / strata.

    One number per depth decides. Its stretch (0, 1) is cut into as many strata as the laws have steps, and
    the middle of each stands for it: no approximation.
    """
    vocab, num, depth = p.shape[-1], len(shape), depth_of(shape)
    everything = histories(vocab, num)
    grid = (torch.cartesian_prod(*[torch.arange(strata)] * (depth + 1)).double() + 0.5) / strata
    grid = grid.reshape(-1, depth + 1)
    rows = everything.repeat_interleave(len(grid), 0)
    uniform = torch.cat([grid, torch.full((len(grid), num - depth), 0.5).double()], 1)
    uniform = uniform.repeat(len(everything), 1)
    last_two, tokens = rows[:, :2], rows[:, 2:]
    parents = torch.tensor(shape).expand(len(rows), -1)
    nodes = [node_law(q, last_two, tokens, parents, i, "without replacement") for i in range(num)]
    weight = torch.full((len(rows),), 1 / len(grid), dtype=torch.float64)
    for i in range(num):
        weight = weight * nodes[i].gather(1, tokens[:, i : i + 1]).squeeze(1)
    target = Distribution.dense(p[tuple(contexts(last_two, tokens, parents).unbind(-1))])
    tree = Proposal.trees(tokens, parents, [num] * len(rows), Distribution.dense(torch.stack(nodes, 1)))
    outcome = ExactMatch().verify(target, tree, Scripted({Purpose.TARGET: uniform}))  # type: ignore[arg-type]
    emitted = []
    for n in range(depth + 1):
        here = outcome.accepted == n
        run = tokens[here].gather(1, outcome.path[here, :n])
        run = torch.cat([last_two[here], run, outcome.next_token[here, None]], 1)
        law = torch.zeros(vocab ** (3 + n), dtype=torch.float64)
        emitted.append(law.index_add(0, number_of(run, vocab), weight[here]).reshape(vocab**2, -1))
    return emitted


@pytest.mark.parametrize("shape", [[-1], [-1, -1], [-1, 0, 0], [-1, 0, -1]], ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_exact_match_of_trees_emits_the_targets_law(shape: list[int], seed: int) -> None:
    """Whole continuations over several rounds have exactly the target's law."""
    strata = 5
    generator = torch.Generator().manual_seed(seed)
    # Each token one fifth, and two fifths dealt out at random: some tables are uneven, none has a zero.
    dealt = torch.randint(3, (3, 3, 2), generator=generator)
    p = (1 + torch.nn.functional.one_hot(dealt, 3).sum(-2)).double() / strata
    q = Toy.random(3, seed=seed).probs
    rounds = exact_match_tree_rounds(p, q, shape, strata)
    horizon = depth_of(shape) + 2
    torch.testing.assert_close(chain_rounds(rounds, horizon), ordinary_law(p, horizon), rtol=0, atol=EXACT)


def mixed_requests(count: int) -> list[Request]:
    kinds = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 2},
        {"top_p": 0.8},
        {"min_p": 0.3, "temperature": 1.5},
    ]
    return [
        Request(i, (i % 3, i % 2), SamplingParams(seed=i, max_new_tokens=5 + i % 16, **kinds[i % 5]))  # type: ignore[arg-type]
        for i in range(count)
    ]


@pytest.mark.parametrize("draw", DRAWS_OF_SIBLINGS)
@pytest.mark.parametrize("noise", [0.0, 0.7, 5.0])
def test_under_one_seed_exact_match_of_trees_is_ordinary_decoding(draw: Draw, noise: float) -> None:
    """Whatever the trees, exact match emits the very tokens of ordinary decoding."""
    toy = Toy.random(3, seed=31)
    requests = mixed_requests(70)
    shapes = [list(SHAPES.values())[i % len(SHAPES)] for i in range(70)]
    trees = decode_trees(toy, toy.blurred(noise, seed=32), ExactMatch(), requests, shapes, draw)
    ordinary = decode(toy, toy, ExactMatch(), requests, 0)
    assert trees == [output.tokens for output in ordinary]


@pytest.mark.parametrize("rule", [RejectionSampling(), ExactMatch()], ids=lambda rule: rule.name)
def test_a_request_does_not_notice_the_trees_of_its_neighbours(rule: Rule) -> None:
    """A request's output is the same alone and in a batch of trees of other shapes and widths."""
    toy = Toy.random(3, seed=33)
    draft = toy.blurred(0.7, seed=34)
    requests = mixed_requests(14)
    shapes = [list(SHAPES.values())[i % len(SHAPES)] for i in range(14)]
    together = decode_trees(toy, draft, rule, requests, shapes)
    alone = [
        decode_trees(toy, draft, rule, [request], [shape])[0]
        for request, shape in zip(requests, shapes, strict=True)
    ]
    turned = decode_trees(toy, draft, rule, requests[::-1], shapes[::-1])[::-1]
    assert together == alone == turned


# Draws. Sizes and seeds were fixed before looking, as in test_faults.py.

SHAPE = SHAPES["depth first"]
HORIZON = depth_of(SHAPE) + 3
PROMPT = (0, 1)
TV = 0.12
DRAWS = stats.draws_needed(TV, 3**HORIZON - 1, 1e-3)
TARGET = Toy.random(3, seed=2, spread=1.5)
DRAFT = TARGET.blurred(1.2, seed=52)


def audit(rule: Rule, draw: Draw, seed: int) -> ChiSquaredResult:
    """Draw continuations of one prompt with trees of many shapes, and judge them."""
    requests = [
        Request(i, PROMPT, SamplingParams(seed=seed * 1_000_003 + i, max_new_tokens=HORIZON))
        for i in range(DRAWS)
    ]
    shapes = [SHAPES["siblings apart"] if i % 3 == 0 else SHAPE for i in range(DRAWS)]
    drawn = decode_trees(TARGET, DRAFT, rule, requests, shapes, draw)
    law = TARGET.exact_law(PROMPT, HORIZON)
    return judge([(law, drawn)], alpha=1e-3, generator=np.random.default_rng(seed))


@pytest.mark.parametrize("rule", [RejectionSampling(), ExactMatch()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("draw", DRAWS_OF_SIBLINGS)
def test_trees_raise_no_alarm(rule: Rule, draw: Draw) -> None:
    """At three fixed seeds the check does not reject, although it would find a distance of .12."""
    results = [audit(rule, draw, seed) for seed in range(3)]
    assert [result.is_rejected for result in results] == [False] * 3
    assert all((result.smallest_detectable_tv or 1) <= TV for result in results)


@pytest.mark.parametrize("rule", [AcceptAll(), ResidualFromP()], ids=lambda rule: type(rule).__name__)
def test_a_fault_of_chains_is_one_of_trees_and_is_found(rule: RejectionSampling) -> None:
    """What breaks chains breaks trees: the exact law is off, and the check finds it."""
    context = PROMPT[0] * 3 + PROMPT[1]
    for shape in (SHAPE, SHAPES["siblings apart"]):
        [rounds] = tree_rounds(rule, TARGET.probs, DRAFT.probs, [shape])
        law = chain_rounds(rounds, HORIZON)
        assert total_variation(law, ordinary_law(TARGET.probs, HORIZON))[context] > TV
    assert all(audit(rule, "without replacement", seed).is_rejected for seed in range(3))
