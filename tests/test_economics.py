"""The break-even and capacity arithmetic, against worked examples and published figures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.economics import break_even, capacity

GIB, MIB, KIB = 2**30, 2**20, 2**10

probabilities = st.floats(0, 1)
depths = st.integers(0, 16)
costs = st.floats(0, 2)


@pytest.mark.parametrize(
    ("alpha", "k", "tokens"), [(0.8, 3, 2.952), (0.8, 6, 3.951), (0.95, 3, 3.710), (0.95, 6, 6.033)]
)
def test_expected_tokens_worked(alpha: float, k: int, tokens: float) -> None:
    """A round under geometric acceptance yields the tokens of METRICS.md."""
    assert break_even.expected_tokens(alpha, k) == pytest.approx(tokens, abs=5e-4)


def test_expected_tokens_at_the_ends() -> None:
    """Nothing accepted leaves the recovered token; everything accepted gives k and the bonus."""
    assert break_even.expected_tokens(0, 5) == 1
    assert break_even.expected_tokens(1, 5) == 6
    assert break_even.expected_tokens(1 - 1e-15, 5) == pytest.approx(6, abs=1e-12)


@given(probabilities, depths)
def test_expected_tokens_is_a_sum(alpha: float, k: int) -> None:
    """The closed form equals 1 + the sum over i of alpha^i, the joint acceptance of a geometric draft."""
    assert break_even.expected_tokens(alpha, k) == pytest.approx(sum(alpha**i for i in range(k + 1)))


# Leviathan, Kalman, Matias, arXiv 2211.17192, table 1 (c = c-hat = 0): alpha, gamma, operations, speedup.
LEVIATHAN_TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speedup"), LEVIATHAN_TABLE_1)
def test_leviathan_table_1(alpha: float, gamma: int, operations: float, speedup: float) -> None:
    """Both columns of the paper's table follow from the formulas, to its two decimals."""
    assert break_even.operations_factor(alpha, gamma) == pytest.approx(operations, abs=0.0051)
    assert break_even.predicted_speedup(alpha, gamma, 0.0) == pytest.approx(speedup, abs=0.0051)


def test_prediction_in_the_wild() -> None:
    """ggml-org/llama.cpp#3649 predicts 2.16 from alpha .8, gamma 5, c .1417 (and measured 1.68)."""
    assert break_even.predicted_speedup(0.8, 5, 0.1417) == pytest.approx(2.16, abs=0.005)


def test_worked_round() -> None:
    """Ordinary 8 ms, draft 3 ms and verify 9 ms: 3.2 tokens per step win, 1.3 lose, 1.5 break even."""
    ratio = break_even.round_cost_ratio(3 + 9, 8)
    assert ratio == 1.5
    assert break_even.seconds_per_token(0.012, 3.2) == pytest.approx(0.00375)
    assert break_even.speedup_from_steps(3.2, ratio) == pytest.approx(2.13, abs=0.005)
    assert break_even.seconds_per_token(0.012, 1.3) == pytest.approx(0.00923, abs=5e-6)
    assert break_even.headroom(3.2, ratio) > 0 > break_even.headroom(1.3, ratio)
    assert break_even.headroom(1.5, ratio) == 0


def test_published_break_even() -> None:
    """50 ms against 32 ms per step breaks even at the 1.56 tokens of Tanguille/cluster#4910."""
    assert break_even.round_cost_ratio(50, 32) == pytest.approx(1.56, abs=0.005)


# hemingkx/Spec-Bench Leaderboard.md @fd2c1cd, 3090, Vicuna-7B-v1.3: mean accepted tokens (bonus included),
# overall speedup, and their quotient.
SPEC_BENCH = {
    "SAMD[EAGLE2]": (4.61, 2.38, 1.937),
    "EAGLE2": (4.35, 2.19, 1.986),
    "EAGLE": (3.57, 2.03, 1.759),
    "Hydra": (3.26, 1.91, 1.707),
    "SpS": (2.28, 1.79, 1.274),
    "PLD": (1.73, 1.64, 1.055),
    "Medusa": (2.32, 1.44, 1.611),
    "Recycling": (2.73, 1.40, 1.950),
    "REST": (1.63, 1.28, 1.273),
    "Lookahead": (1.64, 1.13, 1.451),
}


@pytest.mark.parametrize("method", SPEC_BENCH)
def test_spec_bench_round_costs(method: str) -> None:
    """The leaderboard's mean accepted tokens and speedup imply a round cost, which is the break-even."""
    tokens, speedup, cost = SPEC_BENCH[method]
    implied = break_even.implied_round_cost(tokens, speedup)
    assert implied == pytest.approx(cost, abs=5e-4)
    assert break_even.speedup_from_steps(tokens, implied) == pytest.approx(speedup)
    assert break_even.headroom(implied, implied) == 0


@given(st.floats(0.01, 0.99), st.integers(1, 16))
def test_acceptance_for_tokens_inverts(alpha: float, k: int) -> None:
    """The acceptance found for the tokens of a round is the one that gave them."""
    tokens = break_even.expected_tokens(alpha, k)
    assert break_even.acceptance_for_tokens(tokens, k) == pytest.approx(alpha, abs=1e-9)


@given(st.integers(1, 16), costs)
def test_break_even_acceptance_breaks_even(k: int, draft_cost: float) -> None:
    """At the break-even acceptance the predicted speedup is 1; a draft that costs too much has none."""
    alpha = break_even.break_even_acceptance(k, draft_cost)
    if alpha is None:
        assert break_even.predicted_speedup(1, k, draft_cost) < 1
    else:
        assert break_even.predicted_speedup(alpha, k, draft_cost) == pytest.approx(1)


def test_break_even_acceptance_at_the_ends() -> None:
    """A free draft pays from the first accepted token; one as dear as the target only if all is accepted."""
    assert break_even.break_even_acceptance(4, 0.0) == 0
    assert break_even.break_even_acceptance(4, 1.0) == pytest.approx(1)
    assert break_even.break_even_acceptance(4, 1.1) is None
    assert break_even.acceptance_for_tokens(0.5, 4) == 0
    assert break_even.acceptance_for_tokens(5.1, 4) is None


@given(probabilities, costs)
def test_best_k_is_best(alpha: float, draft_cost: float) -> None:
    """No other k predicts a higher speedup, and 0 is chosen where drafting never pays."""
    best = break_even.best_k(alpha, draft_cost, largest=12)
    speedups = [break_even.predicted_speedup(alpha, k, draft_cost) for k in range(13)]
    assert speedups[best] == max(speedups)
    assert speedups[best] >= 1
    if alpha == 0 or draft_cost > 1:
        assert best == 0


def test_best_k_worked() -> None:
    """At alpha .8 a draft at a tenth of the target's cost is best at k = 6: 2.47 times as fast."""
    assert break_even.best_k(0.8, 0.1) == 6
    assert break_even.predicted_speedup(0.8, 5, 0.1) == pytest.approx(2.4595, abs=5e-5)
    assert break_even.predicted_speedup(0.8, 6, 0.1) == pytest.approx(2.4696, abs=5e-5)
    assert break_even.predicted_speedup(0.8, 7, 0.1) == pytest.approx(2.4477, abs=5e-5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: break_even.expected_tokens(1.1, 3),
        lambda: break_even.expected_tokens(math.nan, 3),
        lambda: break_even.expected_tokens(0.5, -1),
        lambda: break_even.predicted_speedup(0.5, 3, -0.1),
        lambda: break_even.round_cost_ratio(1, 0),
        lambda: break_even.implied_round_cost(1, 0),
        lambda: break_even.headroom(1, 0),
        lambda: break_even.seconds_per_token(1, 0),
        lambda: capacity.sequences_that_fit(GIB, 0, 1),
    ],
)
def test_meaningless_arguments_are_refused(call: object) -> None:
    """An argument without a meaning raises ValueError instead of giving a number."""
    assert callable(call)
    with pytest.raises(ValueError, match="expected"):
        call()


def test_draft_weights_cost_sequences() -> None:
    """A 1B-parameter bf16 draft takes 3 of 57 sequences from a 35 GiB budget, as in METRICS.md."""
    budget, per_token, draft = 35 * GIB, 320 * KIB // 4, 2 * 10**9
    assert capacity.sequences_that_fit(budget, 8000, per_token) == 57
    assert capacity.sequences_that_fit(budget, 8000, per_token, draft_weights=draft) == 54
    assert capacity.sequences_lost(budget, 8000, per_token, draft_weights=draft) == 3


def test_every_draft_cost_counts() -> None:
    """Draft KV and lookahead slots are taken per sequence, weights once; what does not fit at all is 0."""
    assert capacity.sequences_that_fit(1000, 10, 10) == 10
    assert capacity.sequences_that_fit(1000, 10, 10, draft_kv_per_token=2) == 8
    assert capacity.sequences_that_fit(1000, 10, 10, lookahead_tokens=1) == 9
    assert capacity.sequences_that_fit(1000, 10, 10, draft_weights=101) == 8
    assert capacity.sequences_that_fit(1000, 10, 10, draft_weights=2000) == 0


def test_lookahead_bytes_worked() -> None:
    """Four lookahead positions at 320 KiB per token reserve 1.25 MiB per sequence."""
    assert capacity.lookahead_bytes(4, 320 * KIB) == 1.25 * MIB


def test_trees_are_counted_by_nodes() -> None:
    """Two branches at each of three depths are 14 drafts; a root with two such levels is seven nodes."""
    assert capacity.tree_drafts([2, 2, 2]) == 14
    assert capacity.tree_nodes([2, 2]) == 7
    assert capacity.tree_drafts([1] * 5) == 5
    assert capacity.tree_drafts([]) == 0


@pytest.mark.parametrize(("batch", "drafted", "intensity"), [(8, 0, 8), (8, 3, 32), (128, 3, 512)])
def test_decode_intensity(batch: int, drafted: int, intensity: int) -> None:
    """Three drafted tokens per slot make the decode intensity four times the batch."""
    assert capacity.decode_intensity(batch, drafted) == intensity


def test_decode_intensity_crosses_over() -> None:
    """Against a crossover near 333, batch 8 with three drafts is memory-bound and batch 128 is not."""
    assert capacity.decode_intensity(8, 3) < 333 < capacity.decode_intensity(128, 3)
