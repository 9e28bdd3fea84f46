"""The chi-squared check on the toy: lossless rules pass, and every planted fault is found where it shows.

Sizes and seeds were fixed before looking: `DRAWS` from the power of the test, the smallest effect of the
faults from their exact laws.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from specbench import registry, stats
from specbench.audit.chi_squared import ChiSquaredResult, judge
from specbench.decoding.verification import RULES, RejectionSampling, Rule
from specbench.policies.fixed import Fixed
from specbench.records import Request, SamplingParams
from specbench.runtime.protocols import Strategy
from tests.toy import Toy, decode, emitted_law, ordinary_law, total_variation

K = 3
HORIZON = K + 3
PROMPT = (0, 1)
ALPHA = 1e-3
TV = 0.12
"""The smallest distance that the check promises to find here, with probability .99."""
DRAWS = stats.draws_needed(TV, 3**HORIZON - 1, ALPHA)

TARGET = Toy.random(3, seed=2, spread=1.5)
DRAFTS = {
    "self": TARGET,
    "good": TARGET.blurred(1.2, seed=52),
    "bad": Toy(-1.5 * TARGET.logits),
}
ACCEPTANCE = {"self": (1.0, 1.0), "good": (0.6, 0.85), "bad": (0.0, 0.35)}
"""Accepted over tested draft tokens, which makes a draft what its name says."""

LARGE = ("accept-all", "residual-from-p", "bonus-from-previous-row")
"""Faults that change the law here by more than that, wherever they show; test_faults_catalogue.py has all."""

HIDDEN = ("accept-all", "residual-from-p", "residual-absolute", "residual-from-q", "accepts-too-often")
"""Faults that change nothing at all where the draft is the target."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def broken(fault: str) -> Rule:
    """Return the rule of a lossless strategy after the fault was planted in it."""
    strategy = Strategy("toy", None, RejectionSampling(), Fixed(K), lossless=True)
    altered: Strategy = registry.module("fault", fault).alter(strategy)
    return altered.rule


def audit(rule: Rule, draft: Toy, seed: int) -> ChiSquaredResult:
    """Draw continuations of one branch prompt and judge them."""
    requests = [
        Request(i, PROMPT, SamplingParams(seed=seed * 1_000_003 + i, max_new_tokens=HORIZON))
        for i in range(DRAWS)
    ]
    drawn = [output.tokens for output in decode(TARGET, draft, rule, requests, K)]
    law = TARGET.exact_law(PROMPT, HORIZON)
    return judge([(law, drawn)], alpha=ALPHA, generator=np.random.default_rng(seed))


# The ground the check stands on


def test_the_two_exact_laws_of_the_toy_agree() -> None:
    """The law that the check compares with is the one that the property tests compare with."""
    law = TARGET.exact_law(PROMPT, HORIZON)
    context = PROMPT[0] * TARGET.vocab + PROMPT[1]
    other = ordinary_law(TARGET.probs, HORIZON)[context]
    assert list(law.continuations.values()) == pytest.approx(other.tolist(), abs=1e-15)


@pytest.mark.parametrize("regime", DRAFTS)
def test_each_regime_accepts_as_much_as_its_name_says(regime: str) -> None:
    """A draft is accepted always, mostly, or seldom."""
    requests = [Request(i, PROMPT, SamplingParams(seed=i, max_new_tokens=40)) for i in range(200)]
    outputs = decode(TARGET, DRAFTS[regime], RejectionSampling(), requests, K)
    rounds = [counts for output in outputs for counts in output.rounds]
    accepted = sum(kept for _, kept in rounds)
    tested = accepted + sum(kept < drafted for drafted, kept in rounds)
    low, high = ACCEPTANCE[regime]
    assert low <= accepted / tested <= high


# No false alarm


@pytest.mark.parametrize("regime", DRAFTS)
@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule.lossless], ids=lambda r: r.name)
def test_a_lossless_rule_raises_no_alarm(rule: type[Rule], regime: str) -> None:
    """At twenty fixed seeds, the check does not reject, although it would find a distance of .12."""
    results = [audit(rule(), DRAFTS[regime], seed) for seed in range(20)]
    assert [result.is_rejected for result in results] == [False] * 20
    assert all(result.out_of_support == 0 for result in results)
    assert all((result.smallest_detectable_tv or 1) <= TV for result in results)


# Every fault


@pytest.mark.parametrize(
    ("fault", "regime"),
    [(fault, regime) for fault in LARGE for regime in registry.module("fault", fault).SHOWS],
)
def test_a_planted_fault_is_found_where_it_shows(fault: str, regime: str) -> None:
    """The fault's exact law is further from the target's than the check promises to find, and it is found."""
    rule = broken(fault)
    assert isinstance(rule, RejectionSampling)
    exact = emitted_law(rule, TARGET.probs, DRAFTS[regime].probs, K, HORIZON)
    context = PROMPT[0] * TARGET.vocab + PROMPT[1]
    assert total_variation(exact, ordinary_law(TARGET.probs, HORIZON))[context] > TV
    assert all(audit(rule, DRAFTS[regime], seed).is_rejected for seed in range(3))


@pytest.mark.parametrize("fault", HIDDEN)
def test_a_fault_is_invisible_where_it_is_not_exercised(fault: str) -> None:
    """With a draft equal to the target nothing is ever rejected, and faults of rejection change no law."""
    rule = broken(fault)
    assert isinstance(rule, RejectionSampling)
    assert "self" not in registry.module("fault", fault).SHOWS
    exact = emitted_law(rule, TARGET.probs, DRAFTS["self"].probs, K, HORIZON)
    assert total_variation(exact, ordinary_law(TARGET.probs, HORIZON)).max() < 1e-12


def test_the_bonus_fault_fades_with_a_bad_draft() -> None:
    """Under a bad draft a bonus from the wrong row moves the law less than a fifth as far as under self."""
    rule = broken("bonus-from-previous-row")
    assert isinstance(rule, RejectionSampling)
    law = ordinary_law(TARGET.probs, HORIZON)
    distances = {
        regime: total_variation(emitted_law(rule, TARGET.probs, draft.probs, K, HORIZON), law).mean()
        for regime, draft in DRAFTS.items()
    }
    assert distances["bad"] < distances["self"] / 5


def test_one_uniform_per_round_is_found() -> None:
    """A random number reused within a round shows in whole continuations, with a bad draft."""
    assert all(audit(broken("coin-reused-in-round"), DRAFTS["bad"], seed).is_rejected for seed in range(3))
