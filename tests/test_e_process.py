"""The e-process and its alternatives, against brute force on small random laws; no decoder."""

from __future__ import annotations

import doctest
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from specbench.audit import e_process, regimes
from specbench.audit.alternatives import DIRECTIONS, MIX, SMALLEST, Alternatives, Direction
from specbench.audit.e_process import Detectable, EProcess, MarginProcess
from specbench.errors import UsageError

ALL = Alternatives(has_draft=True)
ALPHA = 1e-3


def laws(rows: int, vocab: int, seed: int, spread: float = 2.0) -> Tensor:
    """Draw rows of probabilities, flat and peaked ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    return (logits * spread * torch.rand(rows, 1, generator=generator, dtype=torch.float64)).softmax(-1)


def truncated(law: Tensor, keep: int) -> Tensor:
    """Keep each row's most likely tokens."""
    kept = torch.where(law >= law.topk(keep).values[:, -1:], law, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def pairs() -> dict[str, tuple[Tensor, Tensor]]:
    """Return targets and drafts of every sort that an audit meets."""
    p, q = laws(40, 12, 0), laws(40, 12, 1)
    return {
        "dense": (p, q),
        "truncated target": (truncated(p, 4), q),
        "both truncated": (truncated(p, 4), truncated(q, 3)),
        "one-hot draft": (p, torch.eye(12, dtype=torch.float64)[torch.arange(40) % 12]),
        "one-hot draft off the support": (
            truncated(p, 1),
            torch.eye(12, dtype=torch.float64)[(truncated(p, 1).argmax(-1) + 1) % 12],
        ),
        "draft equals target": (p, p),
        "draft nearly equals target": (p, (p.log() + 1e-9 * q).softmax(-1)),
        "one-hot target": (truncated(p, 1), q),
        "extreme": (laws(40, 12, 2, 400.0), laws(40, 12, 3, 400.0)),
    }


PAIRS = pairs()


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(e_process).failed == 0


# The alternatives


@pytest.mark.parametrize("case", PAIRS)
def test_every_factor_has_expectation_one(case: str) -> None:
    """Under p every alternative's factor averages to 1 and every witness to 0, exactly."""
    p, q = PAIRS[case]
    rows, vocab = p.shape
    scores = ALL.table(p, q)
    factors = torch.from_numpy(scores.log_factors).exp().view(rows, vocab, -1)
    assert torch.allclose((p[..., None] * factors).sum(1), torch.ones(()).double(), rtol=0, atol=1e-9)
    witness = torch.from_numpy(scores.witness).view(rows, vocab, -1)
    assert float((p[..., None] * witness).sum(1).abs().max()) < 1e-12


def test_every_factor_has_expectation_one_without_a_draft() -> None:
    """The same holds for the alternatives that need no draft, of which there are four families."""
    alternatives = Alternatives(has_draft=False)
    assert {d.family for d in alternatives.directions} == {"temper", "uniform mix", "id tilt", "greedy mix"}
    p = PAIRS["dense"][0]
    factors = torch.from_numpy(alternatives.table(p).log_factors).exp().view(*p.shape, -1)
    assert torch.allclose((p[..., None] * factors).sum(1), torch.ones(()).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", PAIRS)
def test_factors_are_those_of_the_laws(case: str) -> None:
    """A factor is .99 a / p + .01, with a law that is nowhere negative and sums to 1 on the support."""
    p, q = PAIRS[case]
    scores = ALL.table(p, q)
    factors = torch.from_numpy(scores.log_factors).exp().view(*p.shape, -1)
    support = p >= SMALLEST
    places = iter(range(len(ALL.names)))
    for direction in ALL.directions:
        for strength in direction.strengths:
            law = ALL.law(direction.name, strength, p, q)
            assert float(law.min()) >= 0
            assert torch.allclose(law.sum(-1), torch.ones(()).double(), rtol=0, atol=1e-9)
            expected = (1 - MIX) * (law / p)[support] + MIX
            assert torch.allclose(factors[..., next(places)][support], expected, rtol=1e-9)


def test_the_families_are_those_of_the_table() -> None:
    """Each direction's law, written out again from the table of families, is the one that is used."""
    p, q = PAIRS["dense"]
    vocab = p.shape[1]
    beta = torch.minimum(p, q).sum(-1, keepdim=True)
    s = 2 * (q - p) / (q + p)
    h = 2 * (p.cumsum(-1) - p / 2) - 1
    greedy = torch.eye(vocab, dtype=torch.float64)[p.argmax(-1)]
    top_residual = torch.eye(vocab, dtype=torch.float64)[(p - q).argmax(-1)]
    loser = torch.where(p > q, q / p, 0.0)
    e = 0.2
    expected = {
        "temper-hot": p**0.8,
        "temper-cold": p**1.3,
        "draft-mix": (1 - e) * p + e * q,
        "lean-to-draft": p * (1 + e * s / 2),
        "lean-from-draft": p * (1 - e * s / 2),
        "uniform-mix": (1 - e) * p + e / vocab,
        "id-up": p * (1 + e * h),
        "id-down": p * (1 - e * h),
        "loser-up": p * (1 + e * loser),
        "loser-down": p * (1 - e * loser),
        "greedy-mix": (1 - e) * p + e * greedy,
        "residual-from-p": (1 - e) * p + e * (torch.minimum(p, q) + (1 - beta) * p),
        "residual-argmax": (1 - e) * p + e * (torch.minimum(p, q) + (1 - beta) * top_residual),
        "draft-number-reused": (1 - e) * p + e * _reused(p, q),
    }
    assert set(expected) == {d.name for d in DIRECTIONS}
    strengths = {"temper-hot": 0.8, "temper-cold": 1.3}
    for name, base in expected.items():
        law = ALL.law(name, strengths.get(name, e), p, q)
        assert torch.allclose(law, base / base.sum(-1, keepdim=True), rtol=1e-9, atol=1e-12), name


def _reused(p: Tensor, q: Tensor) -> Tensor:
    """Return the law of what is emitted when one number draws draft and recovered token."""
    law = torch.minimum(p, q)
    for row in range(len(p)):
        edges = torch.cat([torch.zeros(1).double(), q[row].cumsum(0)])
        lost = torch.cat([torch.zeros(1).double(), (q[row] - p[row]).clamp(min=0).cumsum(0)])
        rest = (p[row] - q[row]).clamp(min=0)
        cdf = (rest / rest.sum()).cumsum(0)
        up_to = np.interp(cdf.numpy(), edges.numpy(), lost.numpy())
        law[row] += torch.from_numpy(np.diff(up_to, prepend=0.0))
    return law


@pytest.mark.parametrize("case", ["dense", "both truncated", "draft equals target", "one-hot draft"])
def test_the_plan_is_what_the_laws_would_earn(case: str) -> None:
    """Growth, variance and distance of the plan equal sums over tokens of the laws written out."""
    p, q = PAIRS[case]
    plan = ALL.plan(p, q)
    factors = torch.from_numpy(ALL.table(p, q).log_factors).view(*p.shape, -1)
    first = 0
    for direction in ALL.directions:
        logs = factors[..., first : first + len(direction.strengths)]
        first += len(direction.strengths)
        for place, strength in enumerate(direction.truths):
            truth = ALL.law(direction.name, strength, p, q)
            mean = (truth[..., None] * logs).sum(1)
            variance = (truth[..., None] * (logs - mean[:, None]) ** 2).sum(1)
            assert plan.growth[direction.name][place] == pytest.approx(
                mean.sum(0).numpy(), rel=1e-6, abs=1e-8
            )
            assert plan.variance[direction.name][place] == pytest.approx(
                variance.sum(0).numpy(), rel=1e-6, abs=1e-8
            )
            distance = float((truth - p).abs().sum() / 2)
            assert plan.tv[direction.name][place] == pytest.approx(distance, rel=1e-6, abs=1e-8)


def test_truths_grow_stronger() -> None:
    """Within a direction the distance from p grows along the strengths that are planned for."""
    p, q = PAIRS["dense"]
    for name, tv in ALL.plan(p, q).tv.items():
        assert (np.diff(tv) > 0).all(), name


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        (torch.full((1, 3), 0.3), torch.full((1, 3), 1 / 3), "a row of p is no distribution"),
        (torch.full((1, 2), 0.5), torch.tensor([[1.5, -0.5]]), "a row of q is no distribution"),
        (torch.full((1, 2), math.nan), torch.full((1, 2), 0.5), "a row of p is no distribution"),
        (torch.full((1, 2), 0.5), None, "q is missing"),
        (torch.full((1, 2), 0.5), torch.full((1, 4), 0.25), "expected that of p"),
    ],
)
def test_what_is_no_law_is_refused(p: Tensor, q: Tensor | None, message: str) -> None:
    """Scores are computed of distributions only."""
    with pytest.raises(ValueError, match=message):
        ALL.score(p, torch.zeros(1, dtype=torch.int64), q)


# The process


def sample(law: Tensor, seed: int) -> Tensor:
    """Draw a token per row."""
    return torch.multinomial(law, 1, generator=torch.Generator().manual_seed(seed)).squeeze(1)


def run(truth: Tensor, p: Tensor, q: Tensor, *, sequences: int, seed: int) -> EProcess:
    """Audit sequences whose t-th token is drawn from the t-th row of `truth`."""
    process = EProcess({"all": True}, alpha=ALPHA)
    rows, vocab = p.shape
    table = ALL.table(p, q)
    for sequence in range(sequences):
        tokens = sample(truth, 1000 * seed + sequence).numpy()
        scores = table.take(np.arange(rows) * vocab + tokens)
        process.update("all", scores, np.full(rows, sequence), np.arange(rows))
    return process


def test_the_evidence_is_the_average_of_products() -> None:
    """The e-value is the mean over alternatives of the product of factors; its supremum is over tokens."""
    p, q = PAIRS["dense"]
    tokens = sample(q, 3)
    products = np.exp(ALL.score(p, tokens, q).log_factors).cumprod(0).mean(1)
    process = EProcess({"all": True}, alpha=ALPHA)
    process.observe("all", p, tokens, q, sequence=0)
    result = process.result()
    assert result.log_e_value == pytest.approx(math.log(products[-1]))
    assert result.log_supremum == pytest.approx(math.log(products.max()))
    first = int(np.flatnonzero(products >= 1 / ALPHA)[0]) + 1
    assert (result.is_rejected, result.tokens_at_alarm, result.tokens) == (True, first, 40)


def test_regimes_are_averaged_with_the_product_that_runs_through_all() -> None:
    """With two regimes the e-value is the mean of theirs and of what common alternatives earn on both."""
    p, q = PAIRS["dense"]
    process = EProcess({"drafted": True, "plain": False}, alpha=ALPHA)
    tokens = sample(p, 4), sample(p, 5)
    process.observe("drafted", p, tokens[0], q, sequence=0)
    process.observe("plain", p, tokens[1], sequence=1)
    plain = Alternatives(has_draft=False)
    one = np.exp(ALL.score(p, tokens[0], q).log_factors.sum(0))
    two = np.exp(plain.score(p, tokens[1]).log_factors.sum(0))
    common = np.array([one[ALL.names.index(name)] for name in plain.names]) * two
    expected = (one.mean() + two.mean() + common.mean()) / 3
    assert process.log_e_value == pytest.approx(math.log(expected))


def test_a_token_outside_the_support_says_nothing() -> None:
    """It is counted, for the support test to judge, and leaves the evidence as it was."""
    p, q = PAIRS["both truncated"]
    process = EProcess({"all": True}, alpha=ALPHA)
    impossible = (p == 0).to(torch.int64).argmax(-1)
    process.observe("all", p, impossible, q, sequence=0)
    assert process.result().unsupported == len(p)
    assert process.log_e_value == 0


@pytest.mark.parametrize("truth", ["target", "draft"])
def test_resuming_equals_going_on(truth: str) -> None:
    """A process saved as JSON in the middle of a sequence and resumed ends as if never interrupted."""
    p, q = PAIRS["dense"]
    law = p if truth == "target" else 0.8 * p + 0.2 * q
    whole = run(law, p, q, sequences=30, seed=1)
    half = run(law, p, q, sequences=12, seed=1)
    tokens = sample(law, 1012)
    half.observe("all", p[:7], tokens[:7], q[:7], sequence=12)
    resumed = EProcess.resume(json.loads(json.dumps(half.state(), allow_nan=False)))
    resumed.observe("all", p[7:], tokens[7:], q[7:], sequence=12, offset=7)
    for sequence in range(13, 30):
        resumed.observe("all", p, sample(law, 1000 + sequence), q, sequence=sequence)
    assert whole.is_rejected == (truth == "draft")
    a, b = whole.result(), resumed.result()
    assert (a.tokens, a.tokens_at_alarm, a.best_alternative) == (
        b.tokens,
        b.tokens_at_alarm,
        b.best_alternative,
    )
    assert a.log_supremum == pytest.approx(b.log_supremum, abs=1e-9)
    assert a.log_e_value == pytest.approx(b.log_e_value, abs=1e-9)
    assert a.regimes[0].worst == b.regimes[0].worst
    one, two = a.regimes[0].effect, b.regimes[0].effect
    assert one is not None
    assert two is not None
    assert (one.direction, one.sequences, one.tokens) == (two.direction, two.sequences, two.tokens)
    assert one.tv == pytest.approx(two.tv)


def test_a_state_of_other_alternatives_is_refused() -> None:
    """Weights are fixed before the first token, so another version's state cannot be continued."""
    state = EProcess({"all": True}, alpha=ALPHA).state()
    state["names"]["all"] = state["names"]["all"][:-1]
    with pytest.raises(UsageError, match="other alternatives"):
        EProcess.resume(state)


@pytest.mark.parametrize(("regimes", "alpha"), [({}, 0.1), ({"a": True}, 0.0), ({"a": True}, 1.0)])
def test_impossible_set_ups_are_refused(regimes: dict[str, bool], alpha: float) -> None:
    """There must be a regime, and a level between 0 and 1."""
    with pytest.raises(ValueError, match="expected"):
        EProcess(regimes, alpha=alpha)


# Beyond a margin


def margin_run(truth: Tensor, p: Tensor, q: Tensor, margin: float, seed: int) -> MarginProcess:
    """Audit 6,000 tokens against a margin, saved and resumed halfway."""
    process = MarginProcess(margin=margin, alpha=ALPHA)
    table = ALL.table(p, q)
    rows, vocab = p.shape
    for sequence in range(120):
        tokens = sample(truth, 1000 * seed + sequence).numpy()
        process.update(table.take(np.arange(rows) * vocab + tokens))
        if sequence == 60:
            process = MarginProcess.resume(json.loads(json.dumps(process.state())))
    return process


def test_only_what_exceeds_the_margin_is_rejected() -> None:
    """A deviation of .1 in TV is found with a margin of .03, and is none of its business with one of .1."""
    p, q = laws(50, 12, 7), laws(50, 12, 8)
    full = (q - p).abs().sum(1, keepdim=True) / 2
    truth = p + 0.1 / full * (q - p)  # the same distance at every token
    assert float((truth - p).abs().sum(1).sub(0.2).abs().max()) < 1e-9
    assert float(truth.min()) > 0
    for seed in range(5):
        found = margin_run(truth, p, q, 0.03, seed)
        assert found.is_rejected
        assert found.log_supremum >= max(found.log_e_value, -math.log(ALPHA))
        assert found.best is not None
        assert ALL.directions[found.best].name in ("draft-mix", "lean-to-draft")
        assert not margin_run(truth, p, q, 0.1, seed).is_rejected
        assert not margin_run(p, p, q, 0.0, seed).is_rejected


def test_a_margin_is_a_distance() -> None:
    """A margin outside [0, 1) is refused; an untouched process has no evidence."""
    with pytest.raises(ValueError, match="distance in TV"):
        MarginProcess(margin=1.0, alpha=ALPHA)
    assert MarginProcess(margin=0.1, alpha=ALPHA).log_e_value == 0
    assert MarginProcess(margin=0.1, alpha=ALPHA).best is None
    assert not MarginProcess(margin=0.1, alpha=ALPHA).is_rejected


# Effects


def test_the_effect_is_estimated_on_sequences_that_did_not_choose_it() -> None:
    """A mixture of known distance is named, and intervals of fresh tokens cover its distance."""
    p, q = laws(50, 12, 7), laws(50, 12, 8)
    truth = 0.7 * p + 0.3 * q
    distance = float((truth - p).abs().sum(1).mean() / 2)
    covered = 0
    for seed in range(20):
        result = run(truth, p, q, sequences=60, seed=seed).result()
        assert (result.is_rejected, result.best_family) == (True, "draft mix")
        effect = result.regimes[0].effect
        assert effect is not None
        assert effect.is_fresh
        assert effect.direction == "draft-mix"
        assert effect.low is not None
        assert effect.high is not None
        covered += effect.low <= distance <= effect.high
    assert covered >= 17  # 95 % of 20, less two standard deviations


def test_a_correct_decoder_has_no_effect() -> None:
    """Without a deviation no audit alarms and intervals, split by sequence, cover 0."""
    p, q = laws(50, 12, 7), laws(50, 12, 8)
    covered = 0
    for seed in range(20):
        result = run(p, p, q, sequences=40, seed=seed).result()
        assert not result.is_rejected
        effect = result.regimes[0].effect
        assert effect is not None
        assert not effect.is_fresh
        assert effect.sequences == 19  # every other one; the fortieth is not known to be over
        assert effect.low is not None
        assert effect.high is not None
        covered += effect.low <= 0 <= effect.high
    assert covered >= 17


def test_few_sequences_give_no_interval() -> None:
    """An estimate from fewer than ten sequences has no interval, and one from none does not exist."""
    p, q = PAIRS["dense"]
    effect = run(p, p, q, sequences=5, seed=0).result().regimes[0].effect
    assert effect is not None
    assert (effect.sequences, effect.low, effect.high) == (2, None, None)
    assert run(p, p, q, sequences=1, seed=0).result().regimes[0].effect is None


def test_the_worst_position_can_be_found_again() -> None:
    """It is the token with the largest factor of the best-fitting alternative."""
    p, q = PAIRS["dense"]
    result = run(q, p, q, sequences=3, seed=2).result()
    worst = result.regimes[0].worst
    assert worst is not None
    place = ALL.names.index(result.best_alternative)
    factors = [ALL.score(p, sample(q, 2000 + s), q).log_factors[:, place] for s in range(3)]
    assert worst.log_factor == max(f.max() for f in factors)
    assert factors[worst.sequence][worst.offset] == worst.log_factor


# What could have been found


def test_more_tokens_find_smaller_effects() -> None:
    """In every direction what can be found shrinks as tokens are added, and nothing is found at first."""
    p, q = laws(50, 30, 9), laws(50, 30, 10)
    process = EProcess({"all": True}, alpha=ALPHA)
    plan = ALL.plan(p, q)
    before: dict[str, float] = {}
    for block in range(4):
        for sequence in range(5 * 4**block):
            scores = ALL.score(p, sample(p, 1000 * block + sequence), q)
            process.update("all", scores, np.full(50, 1000 * block + sequence), np.arange(50), plan)
        for direction in ALL.directions:
            found = process.smallest_detectable_effect(direction.name)
            assert found is not None
            size = found.largest if found.smallest is None else found.smallest
            assert size <= before.get(direction.name, math.inf) + 1e-12
            assert found.within(size)
            before[direction.name] = size
    assert all(size < 0.06 for size in before.values())


def test_nothing_is_claimed_without_contexts_or_strength() -> None:
    """Without tokens there is no answer; a direction that cannot deviate says how little it hides."""
    p, _ = PAIRS["dense"]
    process = EProcess({"same": True, "plain": False}, alpha=ALPHA)
    assert process.smallest_detectable_effect("temper-hot") is None
    assert process.smallest_detectable_effect("temper-hot", "same") is None
    process.observe("same", p, sample(p, 0), p, sequence=0)
    assert process.smallest_detectable_effect("draft-mix") is None  # not every regime has a draft
    same = process.smallest_detectable_effect("draft-mix", "same")
    assert same is not None
    assert same.smallest is None
    assert same.largest < 1e-12
    hot = process.smallest_detectable_effect("temper-hot", "same")
    assert hot is not None
    assert hot.smallest is None
    assert not hot.within(0.1)
    assert Detectable(0.02, 0.5).within(0.03)


def test_examining_every_other_context_changes_little() -> None:
    """What could have been found, from a quarter of the contexts, is near that from all."""
    p, q = laws(400, 30, 11), laws(400, 30, 12)
    found = []
    for every in (1, 4):
        process = EProcess({"all": True}, alpha=ALPHA, plan_every=every)
        for sequence in range(8):
            some = slice(sequence, None)  # so that not the same contexts are examined each time
            process.observe("all", p[some], sample(p, sequence)[some], q[some], sequence=sequence)
        detectable = process.smallest_detectable_effect("lean-to-draft")
        assert detectable is not None
        assert detectable.smallest is not None
        found.append(detectable.smallest)
    assert found[1] == pytest.approx(found[0], rel=0.1)
    assert found[1] != found[0]


# Draft regimes


@pytest.mark.parametrize("regime", regimes.ACCEPTANCE)
def test_a_regime_has_the_acceptance_it_asks_for(regime: str) -> None:
    """A scale calibrated on one sample of contexts gives the wanted acceptance on another."""
    wanted = regimes.ACCEPTANCE[regime]
    logits = 3 * torch.randn(1200, 97, generator=torch.Generator().manual_seed(5))
    scale = regimes.calibrate(logits[:600], wanted)
    got = regimes.acceptance(logits[600:], torch.arange(600), scale)
    assert got == pytest.approx(wanted, abs=0.03)


def test_calibration_sees_the_distribution_that_is_sampled() -> None:
    """With truncation the acceptance is that of the truncated laws."""
    logits = 3 * torch.randn(600, 97, generator=torch.Generator().manual_seed(6))

    def process(rows: Tensor) -> Tensor:
        return truncated(rows.double().softmax(-1), 8)

    scale = regimes.calibrate(logits, 0.7, process=process)
    assert regimes.acceptance(logits, torch.arange(600), scale, process) == pytest.approx(0.7, abs=0.01)
    assert scale < regimes.calibrate(logits, 0.7)


def test_a_draft_is_a_function_of_its_row_and_position() -> None:
    """The same row at the same position gives the same draft in any batch, another position another one."""
    logits = torch.randn(4, 3, 20, generator=torch.Generator().manual_seed(7))
    positions = torch.tensor([[0, 1, 2], [5, 6, 7], [0, 1, 2], [40, 41, 42]])
    together = regimes.draft_logits(logits, positions, 0.5)
    for row in range(4):
        for column in range(3):
            alone = regimes.draft_logits(logits[row, column], positions[row, column], 0.5)
            assert torch.equal(alone, together[row, column])
    noise = together - logits
    assert torch.allclose(noise[0], noise[2], atol=1e-6)
    assert torch.allclose(noise[0, 0].roll(1), noise[0, 1], atol=1e-6)
    assert torch.equal(regimes.draft_logits(logits, positions, 0.0), logits)


def test_an_impossible_acceptance_is_refused() -> None:
    """An acceptance is a probability."""
    with pytest.raises(ValueError, match=r"acceptance of 1\.5"):
        regimes.calibrate(torch.zeros(2, 4), 1.5)


def test_directions_say_what_they_catch() -> None:
    """Every direction names its use, and its alternatives are within the strengths that are planned for."""

    def distance(direction: Direction, strength: float) -> float:
        return abs(strength - 1) if direction.is_power else strength

    for direction in DIRECTIONS:
        assert direction.catches
        weakest, strongest = (distance(direction, direction.truths[end]) for end in (0, -1))
        assert all(weakest < distance(direction, s) <= strongest + 1e-12 for s in direction.strengths)
