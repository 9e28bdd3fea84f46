"""The lossy rules: what they keep, that it is not the target's law, and that the check finds them out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from specbench import registry, stats
from specbench.audit.chi_squared import judge
from specbench.decoding.distribution import Distribution
from specbench.decoding.lossy import PlausibilityRule
from specbench.decoding.random_numbers import RoundRandom, stream_keys
from specbench.decoding.verification import RULES, ExactMatch, Proposal, Rule, Threshold, TopK, Typical
from specbench.errors import UsageError
from specbench.records import Request, SamplingParams
from tests.tables import table, tables
from tests.toy import Toy, chain_rounds, decode, histories, number_of, ordinary_law, total_variation

LOSSY: list[PlausibilityRule] = [Typical(), Threshold(), TopK()]
every = pytest.mark.parametrize("rule", LOSSY, ids=lambda rule: rule.name)


def kept(rule: PlausibilityRule, law: list[float]) -> list[int]:
    """Return the tokens that a rule keeps under a law."""
    tokens = torch.arange(len(law))
    rows = Distribution.dense(table(law).expand(len(law), -1))
    return tokens[rule.plausible(rows, tokens)].tolist()


# What is kept


def test_typical_acceptance_asks_less_where_the_target_is_unsure() -> None:
    """A probability of .08 is kept under a flat law and refused under a peaked one."""
    assert kept(Typical(), [0.08] * 12 + [0.04]) == list(range(13))
    assert kept(Typical(), [0.92, 0.08]) == [0]
    # Between the two: H = 1.3, so that .3 exp(-H) = .079.
    law = [0.5, 0.23, 0.1, 0.095, 0.075]
    edge = 0.3 * math.exp(sum(x * math.log(x) for x in law))
    assert 0.075 < edge < 0.09
    assert kept(Typical(), law) == [0, 1, 2, 3]


@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.2, 0.9), (0.01, 5.0)])
@given(case=tables())
@settings(max_examples=20, deadline=None)
def test_the_threshold_of_typical_acceptance(
    epsilon: float, delta: float, case: tuple[Tensor, Tensor, int]
) -> None:
    """Kept is exactly what exceeds min(epsilon, delta exp(-H)), with 0 log 0 = 0."""
    for law in case[0].reshape(-1, case[0].shape[-1]).tolist():
        entropy = -sum(x * math.log(x) for x in law if x > 0)
        least = min(epsilon, delta * math.exp(-entropy))
        if any(abs(x - least) < 1e-9 for x in law):
            continue
        assert kept(Typical(epsilon, delta), law) == [i for i, x in enumerate(law) if x > least]


def test_a_threshold_keeps_what_reaches_it() -> None:
    """A probability equal to the threshold is enough."""
    law = [0.5, 0.25, 0.125, 0.125]
    assert kept(Threshold(0.25), law) == [0, 1]
    assert kept(Threshold(0.2500001), law) == [0]
    assert kept(Threshold(1.0), [0.0, 1.0, 0.0]) == [1]


def test_top_k_keeps_k_tokens() -> None:
    """Ties go to the lowest id, and what cannot come is not kept even where k has room."""
    law = [0.1, 0.4, 0.1, 0.4, 0.0]
    assert kept(TopK(1), law) == [1]
    assert kept(TopK(2), law) == [1, 3]
    assert kept(TopK(3), law) == [0, 1, 3]
    assert kept(TopK(9), law) == [0, 1, 2, 3]


@every
@given(case=tables())
@settings(max_examples=20, deadline=None)
def test_a_certain_target_keeps_only_its_own_token(
    rule: PlausibilityRule, case: tuple[Tensor, Tensor, int]
) -> None:
    """Whether a point mass is dense or not, exactly its token is plausible."""
    sure = case[0].argmax(-1)
    vocab = case[0].shape[-1]
    tokens = torch.randint(vocab, sure.shape, generator=torch.Generator().manual_seed(1))
    one_hot = Distribution.dense(torch.nn.functional.one_hot(sure, vocab).double())
    assert torch.equal(rule.plausible(Distribution.point(sure), tokens), sure == tokens)
    assert torch.equal(rule.plausible(one_hot, tokens), sure == tokens)


@given(tables())
@settings(max_examples=20, deadline=None)
def test_ranks_are_the_order_of_a_stable_sort(case: tuple[Tensor, Tensor, int]) -> None:
    """The rank of a token is its place when sorted by probability and then id, in both forms."""
    probs = case[0]
    for law in (probs, torch.nn.functional.one_hot(probs.argmax(-1), probs.shape[-1]).double()):
        order = law.argsort(dim=-1, descending=True, stable=True)
        for place in range(law.shape[-1]):
            assert (Distribution.dense(law).rank_of(order[..., place]) == place).all()
            if law is not probs:
                assert (Distribution.point(law.argmax(-1)).rank_of(order[..., place]) == place).all()


# Rounds


@every
def test_a_refusal_ends_the_run_and_the_target_goes_on(rule: PlausibilityRule) -> None:
    """The first implausible token ends the run; the next one comes from p of that row, no residual."""
    likely = [0.6, 0.4, 0.0]
    rows = table(likely, likely, likely, likely)
    batch = 2000
    tokens = torch.tensor([[1, 2, 0]]).expand(batch, -1)
    proposal = Proposal.chains(tokens, [3] * batch, Distribution.point(tokens))
    zeros = torch.zeros(batch, dtype=torch.int64)
    outcome = rule.verify(
        Distribution.dense(rows.expand(batch, -1, -1)),
        proposal,
        RoundRandom(stream_keys(range(batch)), zeros, zeros),
    )
    assert (outcome.accepted == 1).all()
    assert outcome.rejected.all()
    assert outcome.path[0].tolist() == [0, 1, 2]
    # 1200 of 2000 in the mean, standard deviation 22.
    assert 1090 < int((outcome.next_token == 0).sum()) < 1310
    assert (outcome.next_token < 2).all()


@every
def test_with_no_draft_the_output_is_ordinary_decodings(rule: PlausibilityRule) -> None:
    """Drafting nothing, a lossy rule emits the very tokens of ordinary decoding."""
    toy = Toy.random(4, seed=2)
    requests = [Request(i, (0, 1), SamplingParams(seed=i, max_new_tokens=12)) for i in range(40)]
    ordinary = decode(toy, toy, ExactMatch(), requests, 0)
    assert decode(toy, toy, rule, requests, 0) == ordinary
    assert decode(toy, toy.blurred(1.0, seed=3), rule, requests, 2) != ordinary


# They are lossy


def lossy_rounds(rule: PlausibilityRule, p: Tensor, q: Tensor, k: int) -> list[Tensor]:
    """Return the law of what one round emits: for n = 1 to k + 1, `[V * V, V ** n]`, without a coin."""
    vocab = p.shape[-1]
    tokens = histories(vocab, k)
    p_rows, q_rows = (table_[tokens[:, :-1], tokens[:, 1:]] for table_ in (p, q))
    weight = q_rows[:, :k].gather(-1, tokens[:, 2:, None]).squeeze(-1).prod(1)
    proposal = Proposal.chains(tokens[:, 2:], [k] * len(tokens), Distribution.dense(q_rows[:, :k]))
    zeros = torch.zeros(len(tokens), dtype=torch.int64)
    random = RoundRandom(stream_keys(zeros.tolist()), zeros, zeros)
    accepted = rule.verify(Distribution.dense(p_rows), proposal, random).accepted
    law = weight[:, None] * p_rows[torch.arange(len(tokens)), accepted]
    emitted = []
    for n in range(k + 1):
        here = accepted == n
        mass = torch.zeros(vocab ** (2 + n), vocab, dtype=torch.float64)
        mass.index_add_(0, number_of(tokens[here, : 2 + n], vocab), law[here])
        emitted.append(mass.reshape(vocab**2, -1))
    return emitted


K = 2
HORIZON = K + 3
PROMPT = (0, 1)
TV = 0.12
DRAWS = stats.draws_needed(TV, 3**HORIZON - 1, 1e-3)
TARGET = Toy.random(3, seed=2, spread=1.5)
DRAFT = Toy(-1.5 * TARGET.logits)


@every
def test_the_law_of_continuations_is_not_the_targets(rule: PlausibilityRule) -> None:
    """The exact law is further off than the check promises to find, and the check finds it."""
    exact = chain_rounds(lossy_rounds(rule, TARGET.probs, DRAFT.probs, K), HORIZON)
    context = PROMPT[0] * 3 + PROMPT[1]
    assert total_variation(exact, ordinary_law(TARGET.probs, HORIZON))[context] > TV
    law = TARGET.exact_law(PROMPT, HORIZON)
    for seed in range(3):
        requests = [
            Request(i, PROMPT, SamplingParams(seed=seed * 1_000_003 + i, max_new_tokens=HORIZON))
            for i in range(DRAWS)
        ]
        drawn = [output.tokens for output in decode(TARGET, DRAFT, rule, requests, K)]
        assert judge([(law, drawn)], alpha=1e-3, generator=np.random.default_rng(seed)).is_rejected


@every
def test_even_a_perfect_draft_is_no_excuse(rule: PlausibilityRule) -> None:
    """With q = p a draft that is refused is drawn anew from p: unlikely tokens come too seldom."""
    emitted = chain_rounds(lossy_rounds(rule, TARGET.probs, TARGET.probs, 1), 1)
    own = TARGET.probs.reshape(9, 3)
    plausible = rule.plausible(
        Distribution.dense(TARGET.probs[:, :, None].expand(3, 3, 3, 3)), torch.arange(3).expand(3, 3, 3)
    ).reshape(9, 3)
    refused = (own * ~plausible).sum(1, keepdim=True)
    torch.testing.assert_close(emitted, own * (plausible + refused), rtol=0, atol=1e-12)
    assert ((refused > 0) & (refused < 1)).any()


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (Typical, {"epsilon": 0.0}),
        (Typical, {"epsilon": 1.0}),
        (Typical, {"delta": 0.0}),
        (Threshold, {"threshold": 0.0}),
        (Threshold, {"threshold": 1.1}),
        (TopK, {"k": 0}),
    ],
)
def test_parameters_without_meaning_are_refused(rule: type[Rule], values: dict[str, float]) -> None:
    """A rule that would keep everything or nothing is an error that says what was expected."""
    with pytest.raises(ValueError, match="expected"):
        rule(**values)


@pytest.mark.parametrize("strategy", ["draft", "ngram", "early-exit"])
def test_users_choose_a_rule_by_its_name(strategy: str) -> None:
    """Every rule is a value of `verify`, and a near miss is named."""
    for name in RULES:
        spec = registry.parse(f"{strategy}:verify={name}")
        assert registry.options("strategy", spec).verify == name
    with pytest.raises(UsageError, match="did you mean 'typical'"):
        registry.options("strategy", registry.parse(f"{strategy}:verify=typcal"))
