"""Logits become the distributions that transformers' `generate` would sample, whatever the batch."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from specbench.audit.reference import target_distribution
from specbench.decoding import processing
from specbench.decoding.distribution import Distribution
from specbench.decoding.processing import SamplingTensors, process
from specbench.records import GENERATE_ORDER, SamplingParams

VOCAB = 11
EDGE = 1e-5
"""How near two numbers may come before float32 rounding decides how they compare."""

MODEL = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
)
"""Asked only which processors `generate` would build; it never runs."""


def by_transformers(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the probabilities that `generate` would sample from, for logits `[rows, V]`."""
    known: dict[str, Any] = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
    if params.min_p > 0:
        known["min_p"] = params.min_p
    config = GenerationConfig(do_sample=True, **known)
    processors = MODEL._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    return processors(torch.zeros(len(logits), 1, dtype=torch.int64), logits).softmax(-1)


def probs_of(logits: Tensor, *params: SamplingParams) -> Tensor:
    """Return what `process` makes of logits `[B, R, V]`, spelled out."""
    return process(logits, SamplingTensors.of(params)).to_dense(logits.shape[-1], logits.dtype)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    """Draw parameters, each off about half the time."""

    def off_or(off: float, low: float, high: float) -> float:
        return off if draw(st.booleans()) else draw(st.floats(low, high))

    return SamplingParams(
        temperature=off_or(1.0, 0.1, 3.0),
        top_k=draw(st.just(0) | st.integers(1, VOCAB + 2)),
        top_p=off_or(1.0, 0.05, 0.99),
        min_p=off_or(0.0, 0.01, 0.9),
    )


def is_on_an_edge(logits: Tensor, params: SamplingParams) -> bool:
    """Whether rounding decides what top-p or min-p remove."""
    scores = logits.double() / params.temperature
    if params.top_k:
        scores = scores.masked_fill(
            scores < scores.topk(min(params.top_k, VOCAB)).values[..., -1:], -torch.inf
        )
    probs = scores.softmax(-1)
    mass = probs.sort(-1, descending=True).values.cumsum(-1)
    near_top_p = params.top_p < 1 and bool(((mass - params.top_p).abs() < EDGE).any())
    ratios = probs / probs.amax(-1, keepdim=True)
    return near_top_p or bool(((ratios - params.min_p).abs() < EDGE).any() and params.min_p > 0)


# Against transformers


@given(parameters(), st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_probabilities_are_those_of_generate(params: SamplingParams, seed: int) -> None:
    """For any parameters, the distribution is the one that transformers' own processors make."""
    logits = 2 * randn(3, VOCAB, seed=seed)
    assume(not is_on_an_edge(logits, params))
    ours = probs_of(logits[None], params)[0]
    theirs = by_transformers(logits, params)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_the_default_order_is_that_of_generate() -> None:
    """`GENERATE_ORDER` names the processors in the order in which transformers lists them."""
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)
    built = MODEL._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    classes = {
        "TemperatureLogitsWarper": "temperature",
        "TopKLogitsWarper": "top_k",
        "TopPLogitsWarper": "top_p",
        "MinPLogitsWarper": "min_p",
    }
    assert tuple(classes[type(processor).__name__] for processor in built) == GENERATE_ORDER


@given(parameters(), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_ties_are_broken_as_generate_breaks_them(params: SamplingParams, seed: int) -> None:
    """Of equal logits top-k keeps all, and top-p drops the lower ids first, as transformers does."""
    logits = randn(4, VOCAB, seed=seed).round()
    assume(not is_on_an_edge(logits, params))
    ours = probs_of(logits[None], params)[0]
    theirs = by_transformers(logits, params)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@given(parameters(), st.permutations(GENERATE_ORDER), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_the_decoder_and_the_oracle_agree_in_every_order(
    params: SamplingParams, order: list[str], seed: int
) -> None:
    """The audit's independent implementation makes the same distribution, whatever the order."""
    params = SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p, order=tuple(order))
    logits = 2 * randn(2, VOCAB, seed=seed, dtype=torch.float64)
    ours = probs_of(logits[None], params)[0]
    torch.testing.assert_close(ours, target_distribution(logits, params), rtol=1e-9, atol=1e-12)


# Each parameter


def logs(*probs: float) -> Tensor:
    """Return logits `[1, 1, V]` of given probabilities."""
    return torch.tensor(probs, dtype=torch.float64).log()[None, None]


def support(probs: Tensor) -> list[int]:
    return probs.flatten().nonzero().flatten().tolist()


def test_nothing_asked_for_is_the_softmax() -> None:
    """With every parameter off, the distribution is the softmax of the logits."""
    logits = randn(2, 3, VOCAB)
    torch.testing.assert_close(probs_of(logits, *[SamplingParams()] * 2), logits.softmax(-1), rtol=0, atol=0)


def test_top_k_keeps_ties() -> None:
    """Every token that ties with the k-th one stays."""
    assert support(probs_of(logs(0.3, 0.2, 0.1, 0.2, 0.2), SamplingParams(top_k=2))) == [0, 1, 3, 4]


def test_top_k_beyond_the_vocabulary_removes_nothing() -> None:
    """A top_k larger than the vocabulary is no limit."""
    assert support(probs_of(logs(0.3, 0.2, 0.5), SamplingParams(top_k=50))) == [0, 1, 2]


@pytest.mark.parametrize(("mass", "kept"), [(0.45, [3]), (0.55, [0, 3]), (0.75, [0, 3]), (0.85, [0, 1, 3])])
def test_top_p_keeps_the_token_that_crosses_the_mass(mass: float, kept: list[int]) -> None:
    """The most likely tokens stay until they hold the mass; the one that gets there stays too."""
    assert support(probs_of(logs(0.3, 0.15, 0.05, 0.5), SamplingParams(top_p=mass))) == kept


def test_top_p_keeps_no_more_than_the_mass_when_it_is_met_exactly() -> None:
    """Of four equal tokens a mass of one half keeps two, the higher ids, as transformers does."""
    params = SamplingParams(top_p=0.5)
    assert support(probs_of(torch.zeros(1, 1, 4), params)) == [2, 3]
    assert support(by_transformers(torch.zeros(1, 4), params)) == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_top_p_is_greedy(dtype: torch.dtype) -> None:
    """However small top_p is, the most likely token stays."""
    for mass in (1e-9, 1e-60):
        probs = probs_of(logs(0.3, 0.15, 0.05, 0.5).to(dtype), SamplingParams(top_p=mass))
        assert probs.flatten().tolist() == [0, 0, 0, 1]


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    """Tokens below min_p times the largest probability go."""
    assert support(probs_of(logs(0.3, 0.15, 0.05, 0.5), SamplingParams(min_p=0.2))) == [0, 1, 3]
    assert support(probs_of(logs(0.3, 0.15, 0.05, 0.5), SamplingParams(min_p=1.0))) == [3]


def test_the_order_matters_and_is_obeyed() -> None:
    """Temperature before top-p and after it keep different tokens."""
    logits = logs(0.5, 0.3, 0.2)
    first = SamplingParams(temperature=3.0, top_p=0.75)
    last = SamplingParams(temperature=3.0, top_p=0.75, order=("top_k", "top_p", "min_p", "temperature"))
    assert support(probs_of(logits, first)) == [0, 1, 2]
    assert support(probs_of(logits, last)) == [0, 1]


@pytest.mark.parametrize("others", [[], [SamplingParams()]], ids=["alone", "beside a sampled row"])
def test_temperature_zero_is_the_lowest_of_the_most_likely_ids(others: list[SamplingParams]) -> None:
    """Temperature 0 is the point mass on the most likely token, the lowest id on ties."""
    logits = torch.tensor([1.0, 3.0, 0.0, 3.0]).expand(1 + len(others), 2, 4)
    greedy = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)
    probs = probs_of(logits, greedy, *others)
    assert probs[0].tolist() == [[0, 1, 0, 0]] * 2


def test_an_all_greedy_batch_needs_no_probabilities() -> None:
    """Point masses stay in their short form."""
    law = process(randn(2, 3, VOCAB), SamplingTensors.of([SamplingParams(temperature=0.0)] * 2))
    assert law.probs is None
    assert law.shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_processed_in_float32(dtype: torch.dtype) -> None:
    """Half-precision logits give the probabilities of the same logits in float32."""
    logits = randn(1, 2, VOCAB).to(dtype)
    params = SamplingParams(temperature=0.7, top_p=0.9)
    law = process(logits, SamplingTensors.of([params]))
    assert law.probs is not None
    assert torch.equal(law.probs, probs_of(logits.float(), params))


# Batches


@given(st.lists(parameters() | st.just(SamplingParams(temperature=0.0)), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_rows_of_a_batch_are_as_if_alone(params: list[SamplingParams]) -> None:
    """In a batch of different parameters, greedy ones among them, each row is what it is alone."""
    logits = randn(len(params), 3, VOCAB, seed=len(params))
    together = probs_of(logits, *params)
    alone = torch.cat([probs_of(logits[i : i + 1], one) for i, one in enumerate(params)])
    assert torch.equal(together, alone)


def test_two_orders_in_one_batch_are_refused() -> None:
    """A batch is processed in one order; two raise ValueError."""
    with pytest.raises(ValueError, match="two orders"):
        SamplingTensors.of([SamplingParams(), SamplingParams(order=GENERATE_ORDER[::-1])])


def test_an_empty_batch_is_allowed() -> None:
    """No request, no distribution."""
    law = process(torch.zeros(0, 1, VOCAB), SamplingTensors.of([]))
    assert law.shape == (0, 1)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"max_new_tokens": -1},
        {"order": ("temperature", "top_k", "top_p")},
        {"order": ("temperature", "top_k", "top_p", "top_p")},
    ],
    ids=str,
)
def test_parameters_without_a_meaning_are_refused(bad: dict[str, Any]) -> None:
    """A bad value raises a ValueError that names the parameter."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


# Large vocabularies


def large_cases() -> dict[str, Tensor]:
    """Return logits `[1, 2, 4096]`: a nucleus far smaller than the guess, far larger, and around it."""
    noise = randn(1, 2, 4096, seed=1)
    rising = torch.arange(4096.0).flip(0).expand(1, 2, -1)
    return {
        "small nucleus": 4 * noise,
        "large nucleus": 0.3 * noise,
        "one of each": torch.stack([4 * noise[0, 0], 0.3 * noise[0, 1]])[None],
        "around the guess": -(rising / 300.0),
        "many ties": (2 * noise).round(),
        "all equal": torch.zeros(1, 2, 4096),
    }


@pytest.mark.parametrize("name", large_cases())
@pytest.mark.parametrize("mass", [0.3, 0.8, 0.818, 0.95])
def test_the_short_cut_of_top_p_changes_nothing(
    name: str, mass: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With over 2048 tokens, top-p by the largest 512 keeps the very tokens that a full sort keeps."""
    logits = large_cases()[name]
    short = probs_of(logits, SamplingParams(top_p=mass))
    monkeypatch.setattr(processing, "_NUCLEUS_GUESS", 4096)
    full = probs_of(logits, SamplingParams(top_p=mass))
    assert torch.equal(short, full)
    if name not in ("many ties", "all equal"):
        torch.testing.assert_close(full[0], by_transformers(logits[0], SamplingParams(top_p=mass, top_k=0)))


def test_the_cases_of_the_short_cut_are_on_both_sides() -> None:
    """The guess suffices in one of the cases above and falls short in another."""
    sizes = {
        name: (probs_of(logits, SamplingParams(top_p=0.8)) > 0).sum(-1).flatten().tolist()
        for name, logits in large_cases().items()
    }
    assert max(sizes["small nucleus"]) < 512 < min(sizes["large nucleus"])
    assert sizes["one of each"][0] < 512 < sizes["one of each"][1]


def test_a_large_row_does_not_notice_a_neighbour_that_needs_the_sort() -> None:
    """Whether the guess suffices is a matter of the whole batch; what a row keeps is not."""
    ties = (2 * randn(1, 1, 4096, seed=1)).round()
    flat = torch.zeros(1, 1, 4096)
    params = SamplingParams(top_p=0.8)
    together = probs_of(torch.cat([ties, flat]), params, params)
    assert torch.equal(together[:1], probs_of(ties, params))
    assert torch.equal(together[1:], probs_of(flat, params))


# Drawing


def test_tokens_come_as_often_as_they_are_likely() -> None:
    """Over an even grid of uniforms each token is drawn as often as its probability, to one point."""
    probs = torch.tensor([0.1, 0.0, 0.25, 0.05, 0.6, 0.0])
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    drawn = Distribution.dense(probs.expand(len(grid), -1)).sample(grid)
    counts = drawn.bincount(minlength=len(probs))
    assert (counts - 20_000 * probs.double()).abs().max() <= 1
    assert counts[probs == 0].sum() == 0
    assert (drawn.diff() >= 0).all()  # inverse CDF in id order


def test_weights_need_not_be_normalised() -> None:
    """Multiplying all weights by a number changes no draw."""
    weights = torch.tensor([3.0, 0.0, 1.0, 4.0])
    grid = (torch.arange(999, dtype=torch.float64) + 0.5) / 999
    draws = [
        Distribution.dense((factor * weights).expand(999, -1)).sample(grid)
        for factor in (1.0, 2.0**-100, 2.0**20)
    ]
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_uniform_draws_a_token_without_mass(uniform: float, dtype: torch.dtype) -> None:
    """Even at the ends of the interval, and for the tiniest mass, the token drawn has some."""
    for weights in itertools.product([0.0, 1e-38, 0.1, 1 / 3, 0.7], repeat=4):
        if sum(weights) > 0:
            law = Distribution.dense(torch.tensor(weights, dtype=dtype))
            token = int(law.sample(torch.tensor(uniform, dtype=torch.float64)))
            assert weights[token] > 0


def test_the_tail_of_a_large_vocabulary_keeps_its_mass() -> None:
    """Where a float32 sum would have lost them, tokens of the tail still come in their turn."""
    tail = 5_000
    probs = torch.cat([torch.ones(1), torch.full((tail,), 2e-8)])
    assert probs[0] + probs[1] == 1  # in float32
    share = 2e-8 * tail / (1 + 2e-8 * tail)
    for token in (1, 10, tail // 2, tail):
        uniform = 1 - share * (1 - (token - 0.5) / tail)
        drawn = Distribution.dense(probs).sample(torch.tensor(uniform, dtype=torch.float64))
        assert abs(int(drawn) - token) <= 1


def test_rows_share_a_shape_with_their_uniforms() -> None:
    """Distributions of shape [B, R] take uniforms of shape [B, R], and each row its own."""
    probs = torch.eye(4)[torch.tensor([[0, 1, 2], [3, 2, 1]])]
    law = Distribution.dense(probs)
    assert law.sample(torch.full((2, 3), 0.5, dtype=torch.float64)).tolist() == [[0, 1, 2], [3, 2, 1]]
    assert law.shape == (2, 3)


def test_both_forms_of_a_point_mass_answer_alike() -> None:
    """Probabilities, rows, parts and samples of point masses equal those of the same laws spelled out."""
    tokens = torch.tensor([[2, 0, 1], [1, 1, 3]])
    point = Distribution.point(tokens)
    dense = Distribution.dense(point.to_dense(4))
    half = torch.full((2, 3), 0.5, dtype=torch.float64)
    asked, index = torch.tensor([[2, 1, 1], [0, 1, 3]]), torch.tensor([2, 0])
    assert point.shape == dense.shape
    assert torch.equal(point.prob_of(asked), dense.prob_of(asked).double())
    assert torch.equal(point.sample(half), dense.sample(half))
    assert torch.equal(point.rows(index).sample(half[:, 0]), dense.rows(index).sample(half[:, 0]))
    assert torch.equal(point.narrow(1, 2).sample(half[:, 1:]), dense.narrow(1, 2).sample(half[:, 1:]))
