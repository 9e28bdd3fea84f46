"""The toy decoder and the audit of it: lossless rules pass, faults are found, about when they should be."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from specbench import stats
from specbench.audit import regimes, toy
from specbench.audit.alternatives import DIRECTIONS, Alternatives
from specbench.audit.e_process import EProcess, sequence_numbers
from specbench.audit.toy import FAULTS, RULES, Decoded, Rule, ToyPair

ALPHA = 1e-3
QUICK = 15_000
EOS = 1
PAIRS = {name: ToyPair.make(64, acceptance=wanted) for name, wanted in regimes.ACCEPTANCE.items()}
SMALL = {
    name: ToyPair.make(5, acceptance=wanted, contexts=7) for name, wanted in (("good", 0.7), ("bad", 0.4))
}


def tokens_to_detection(pair: ToyPair, fault: toy.Fault, *, number: int, budget: int) -> list[float]:
    """Return when audits in one regime alarmed, infinite where they did not."""
    rng = np.random.default_rng(1)
    found = toy.audits({"only": pair}, rng, number=number, budget=budget, alpha=ALPHA, fault=fault)
    return [process.result().tokens_at_alarm or math.inf for process in found]


# The decoder


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("regime", SMALL)
def test_lossless_rules_emit_the_target(rule: Rule, regime: str) -> None:
    """Pairs of successive tokens, given the context, are as frequent as the target says."""
    pair = SMALL[regime].with_argmax_draft() if rule == "argmax" else SMALL[regime]
    decoded = toy.decode(pair, np.random.default_rng(3), sequences=2000, length=50, rule=rule)
    statistic, df = 0.0, 0
    first, second = decoded.tokens[:, :-1], decoded.tokens[:, 1:]
    for context in range(len(pair.p)):
        here = decoded.context[:, :-1] == context
        for token in range(pair.vocab):
            chosen = here & (first == token)
            following = decoded.context[:, 1:][chosen]
            expected = pair.p[following].sum(0)
            observed = np.bincount(second[chosen], minlength=pair.vocab)
            if len(following) and expected.min() >= 10:
                statistic += stats.chi_squared_statistic(observed, expected)
                df += pair.vocab - 1
        observed = np.bincount(decoded.tokens[:, :-1][here], minlength=pair.vocab)
        statistic += stats.chi_squared_statistic(observed, here.sum() * pair.p[context])
        df += pair.vocab - 1
    assert df > 50
    assert stats.tail_p_value(statistic, df) > 1e-3


def acceptance_z(decoded: Decoded, rule: Rule) -> float:
    """Return the acceptance martingale in standard deviations."""
    rounds = decoded.rounds
    ratio = np.minimum(1.0, rounds.p / np.where(rounds.tested, rounds.q, 1.0))
    if rule == "block":
        share = np.ones(len(ratio))
        expected = np.zeros(len(ratio))
        for place in range(ratio.shape[1]):
            share = np.minimum(1.0, share * rounds.p[:, place] / rounds.q[:, place])
            expected += share
        difference = rounds.accepted - expected
        return float(difference.sum() / math.sqrt((difference**2).sum()))
    chance = rounds.p if rule == "exact" else ratio
    differences = (rounds.kept - chance)[rounds.tested]
    return float(differences.sum() / math.sqrt((differences**2).sum()))


@pytest.mark.parametrize("rule", RULES)
def test_the_records_of_acceptance_are_a_martingale(rule: Rule) -> None:
    """What was accepted, less its chance by p and q as recorded, averages to 0 under every rule."""
    pair = PAIRS["good"].with_argmax_draft() if rule == "argmax" else PAIRS["good"]
    decoded = toy.decode(pair, np.random.default_rng(4), sequences=1000, length=50, rule=rule)
    assert abs(acceptance_z(decoded, rule)) < 3.5
    assert (decoded.rounds.accepted <= decoded.rounds.offered).all()
    assert not (decoded.rounds.kept & ~decoded.rounds.tested).any()


def test_records_of_acceptance_show_a_generous_test() -> None:
    """A ratio scaled by 1.1 moves the same sum by many standard deviations."""
    rng = np.random.default_rng(4)
    decoded = toy.decode(PAIRS["good"], rng, sequences=1000, length=50, fault=FAULTS["ratio-1.1"])
    assert acceptance_z(decoded, "rejection") > 6


def test_better_rules_accept_more() -> None:
    """Block verification and a second sibling accept more than token-wise rejection, exact match less."""
    rates = {
        rule: toy.decode(PAIRS["good"], np.random.default_rng(5), sequences=500, length=50, rule=rule)
        .rounds.acceptance_rate
        for rule in ("exact", "rejection", "block", "tree")
    }  # fmt: skip
    assert rates["exact"] < rates["rejection"] < min(rates["block"], rates["tree"])


def test_rounds_and_tokens_agree() -> None:
    """The tokens of each round are its accepted drafts, and rounds follow one another without a gap."""
    decoded = toy.decode(PAIRS["good"], np.random.default_rng(6), sequences=20, length=40, k=3)
    rounds = decoded.rounds
    for sequence in range(20):
        mine = rounds.of(rounds.sequence == sequence)
        position = 1  # the first token comes from the prefill
        for start, accepted, drafted in zip(mine.start, mine.accepted, mine.drafted, strict=True):
            assert start == position
            inside = min(accepted, 40 - start)
            assert (decoded.tokens[sequence, start : start + inside] == drafted[:inside]).all()
            position += accepted + 1
        assert position >= 40


def test_a_sequence_ends_with_its_eos() -> None:
    """Lengths include the first EOS, and what is handed to the audit stops there."""
    decoded = toy.decode(PAIRS["good"], np.random.default_rng(7), sequences=50, length=60, eos=EOS)
    ended = decoded.lengths < 60
    assert ended.any()
    for sequence in np.flatnonzero(ended):
        tokens = decoded.tokens[sequence, : decoded.lengths[sequence]]
        assert tokens[-1] == EOS
        assert EOS not in tokens[:-1]
    numbers, offsets, _, tokens = decoded.flat(10, 30)
    expected = sequence_numbers(decoded.lengths[10:30].tolist())
    assert (numbers == expected[0] + 10).all()
    assert (offsets == expected[1]).all()
    assert len(tokens) == decoded.lengths[10:30].sum()


def test_prompts_may_be_given() -> None:
    """The first token of every sequence is drawn after the prompt it was given."""
    pair = PAIRS["good"]
    prompts = np.array([[3, 5], [60, 1], [0, 0]])
    decoded = toy.decode(pair, np.random.default_rng(0), sequences=3, length=4, prompts=prompts)
    assert decoded.context[:, 0].tolist() == [int(pair.context(*prompt)) for prompt in prompts]


def _decode_briefly(rule: Rule, fault: toy.Fault) -> None:
    toy.decode(PAIRS["good"], np.random.default_rng(0), sequences=1, length=5, rule=rule, fault=fault)


def test_only_rules_with_a_token_wise_test_carry_faults() -> None:
    """A fault that a rule would ignore is refused."""
    with pytest.raises(ValueError, match="cannot carry a fault"):
        _decode_briefly("exact", FAULTS["accept-all"])


# Audits


@pytest.mark.parametrize("rule", RULES)
def test_lossless_rules_do_not_alarm(rule: Rule) -> None:
    """Ten quick audits of every lossless rule, over three regimes and with EOS, find nothing."""
    rng = np.random.default_rng(8)
    for process in toy.audits(PAIRS, rng, number=10, budget=QUICK, alpha=ALPHA, rule=rule, eos=EOS):
        result = process.result()
        assert not result.is_rejected
        assert result.tokens_at_alarm is None
        assert result.unsupported == 0
        assert 0.8 * QUICK < result.tokens < 1.2 * QUICK


MEDIANS: Mapping[str, tuple[str, int]] = {
    "accept-all": ("good", 100),
    "bonus-previous-row": ("self", 200),
    "greedy-draft": ("good", 250),
    "typical": ("good", 500),
    "residual-p": ("good", 700),
    "ratio-1.1": ("good", 10_000),
}
"""What AUDIT.md reports (27, 24, 142, 495, 374 and 5,200 tokens), with room for another toy model."""


@pytest.mark.parametrize("name", MEDIANS)
def test_faults_are_found_as_soon_as_promised(name: str) -> None:
    """Median tokens to detection at 1e-3 in one regime are of the order that AUDIT.md states."""
    regime, most = MEDIANS[name]
    found = tokens_to_detection(PAIRS[regime], FAULTS[name], number=15, budget=20_000)
    assert float(np.median(found)) < most


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found(name: str) -> None:
    """In the regime where it shows, every fault is found in at least four of five audits."""
    fault = FAULTS[name]
    found = tokens_to_detection(PAIRS[fault.regime], fault, number=5, budget=25_000)
    assert sum(map(math.isfinite, found)) >= 4


@pytest.mark.parametrize(
    ("name", "regime", "family"),
    [
        ("accept-all", "good", "draft mix"),
        ("residual-p", "good", "mechanistic"),
        ("residual-argmax", "bad", "mechanistic"),
        ("draft-number-reused", "bad", "mechanistic"),
        ("draft-race-reused", "bad", "loser tilt"),
        ("coin-reused-for-residual", "good", "id tilt"),
        ("forgot-q", "good", "lean"),
        ("temperature", "self", "temper"),
        ("bonus-argmax", "self", "greedy mix"),
        ("padding-id", "self", "uniform mix"),
    ],
)
def test_the_best_alternative_names_the_family(name: str, regime: str, family: str) -> None:
    """Most audits of a fault are explained by its own family."""
    rng = np.random.default_rng(9)
    audits = toy.audits(
        {"only": PAIRS[regime]}, rng, number=5, budget=25_000, alpha=ALPHA, fault=FAULTS[name]
    )
    families = [process.result().best_family for process in audits]
    assert families.count(family) >= 3


@pytest.mark.parametrize(
    ("name", "regime"),
    [("residual-p", "self"), ("accept-all", "self"), ("bonus-previous-row", "bad")],
)
def test_a_fault_that_is_not_exercised_is_not_found(name: str, regime: str) -> None:
    """Residual and accept faults are invisible under a perfect draft, bonus faults nearly under a bad one."""
    assert tokens_to_detection(PAIRS[regime], FAULTS[name], number=3, budget=6000) == [math.inf] * 3


def test_three_regimes_together_find_what_each_shows() -> None:
    """Faults that show in different regimes are all found by one audit over three."""
    for name in ("residual-p", "bonus-argmax", "rejected-visible"):
        rng = np.random.default_rng(10)
        for process in toy.audits(PAIRS, rng, number=3, budget=QUICK, alpha=ALPHA, fault=FAULTS[name]):
            assert process.is_rejected


def test_leaving_out_eos_accuses_a_correct_decoder() -> None:
    """Tokens must not be dropped for what they are: without EOS the null no longer holds."""
    pair = PAIRS["good"]
    decoded = toy.decode(pair, np.random.default_rng(11), sequences=4000, length=100, eos=EOS)
    numbers, offsets, context, tokens = decoded.flat(0, 4000)
    places = context * pair.vocab + tokens
    rejected = []
    for chosen in (np.ones(len(tokens), dtype=bool), tokens != EOS):
        process = EProcess({"only": True}, alpha=ALPHA)
        process.update("only", pair.scores.take(places[chosen]), numbers[chosen], offsets[chosen])
        rejected.append(process.is_rejected)
    assert rejected == [False, True]


# The smallest detectable effect against simulated detection


@pytest.mark.parametrize(
    "direction",
    [d.name for d in DIRECTIONS if d.name not in ("id-down", "loser-up")],  # the mirrors of others
)
def test_twice_the_smallest_detectable_effect_is_found(direction: str) -> None:
    """Of 100 streams that deviate by twice the smallest detectable effect, at least 95 are found.

    Where the direction cannot deviate by that much, it deviates as far as it can.
    """
    budget, number = 3000, 100
    pair = PAIRS["bad" if direction == "loser-down" else "good"]
    rng = np.random.default_rng(12)
    (null,) = toy.audits({"only": pair}, rng, number=1, budget=budget, alpha=ALPHA, plan=True)
    assert not null.is_rejected
    detectable = null.smallest_detectable_effect(direction)
    assert detectable is not None
    assert detectable.smallest is not None
    size = min(2 * detectable.smallest, detectable.largest)
    deviating = deviates_by(pair, direction, size)
    decoded = toy.decode(deviating, rng, sequences=number * budget // 100, length=100)
    found = 0
    for place in range(number):
        numbers, offsets, context, tokens = decoded.flat(place * budget // 100, (place + 1) * budget // 100)
        process = EProcess({"only": True}, alpha=ALPHA)
        process.update("only", pair.scores.take(context * pair.vocab + tokens), numbers, offsets)
        found += process.is_rejected
    assert found >= 95


def deviates_by(pair: ToyPair, direction: str, size: float) -> ToyPair:
    """Return the pair whose target is a direction's law of that distance."""
    alternatives = Alternatives(has_draft=True)
    truths = next(d for d in alternatives.directions if d.name == direction).truths
    p, q = torch.from_numpy(pair.p), torch.from_numpy(pair.q)
    low, high = truths[0], truths[-1]
    for _ in range(40):
        strength = (low + high) / 2
        law = alternatives.law(direction, strength, p, q)
        if float((law - p).abs().sum(1).mean()) / 2 < size:
            low = strength
        else:
            high = strength
    return ToyPair(law.numpy(), pair.q)


def test_the_toy_needs_no_transformers() -> None:
    """The statistics can be checked where no model library is installed."""
    script = "import sys; import specbench.audit.toy; sys.exit('transformers' in sys.modules)"
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", script], cwd=root, check=False).returncode == 0
