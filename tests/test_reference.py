"""The oracle, against transformers' own processors, against enumeration, and against `generate`."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specbench.audit import reference
from specbench.audit.chi_squared import Continuation, ExpectedTable, judge
from specbench.audit.reference import Oracle, target_distribution
from specbench.errors import ModelError, UsageError
from specbench.records import GENERATE_ORDER, SamplingParams

VOCAB = 17
PROMPT = (3, 1, 4, 1, 5)


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Return a random model, its head scaled up so that its distributions are far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family == "llama":
            model: PreTrainedModel = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=VOCAB,
                    hidden_size=16,
                    intermediate_size=32,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    max_position_embeddings=64,
                    bos_token_id=None,
                    eos_token_id=None,
                )
            )
        else:
            model = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=VOCAB,
                    n_embd=16,
                    n_layer=2,
                    n_head=2,
                    n_positions=64,
                    bos_token_id=None,
                    eos_token_id=None,
                    tie_word_embeddings=False,
                )
            )
        model.get_output_embeddings().weight.data.normal_(0, 0.7)
    return model.eval()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These models are too small to share among threads; on a busy machine that costs seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    """A tiny random Llama."""
    return tiny_model("llama")


# The distribution


def by_transformers(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Process logits with transformers' classes, in float64."""
    warpers: dict[str, Callable[[None, Tensor], Tensor]] = {
        "temperature": TemperatureLogitsWarper(sampling.temperature),
        "min_p": MinPLogitsWarper(sampling.min_p),
    }
    if sampling.top_k > 0:
        warpers["top_k"] = TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1:
        warpers["top_p"] = TopPLogitsWarper(sampling.top_p)
    scores = logits.double()
    for name in sampling.order:
        if name in warpers:
            scores = warpers[name](None, scores)
    return scores.softmax(-1)


SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.floats(0.2, 3),
    top_k=st.sampled_from([0, 1, 2, 3, 8, 50]),
    top_p=st.one_of(st.just(1.0), st.sampled_from([0.1, 0.5, 0.9]), st.floats(0.01, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    order=st.permutations(GENERATE_ORDER).map(tuple),
)


@settings(max_examples=100)
@given(SAMPLINGS, st.integers(0, 10_000), st.booleans())
def test_distributions_are_those_of_transformers(sampling: SamplingParams, seed: int, ties: bool) -> None:
    """For random parameters in any order, with and without ties, probabilities are transformers' own."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, 13, generator=generator)
    if ties:
        logits = logits.round()
    probs = target_distribution(logits, sampling)
    assert probs.dtype == torch.float64
    torch.testing.assert_close(probs, by_transformers(logits, sampling), rtol=1e-12, atol=1e-15)


def test_top_k_keeps_every_token_that_ties_with_the_last() -> None:
    """Tokens equal to the k-th largest logit all stay."""
    probs = target_distribution(torch.tensor([2.0, 1.0, 1.0, 0.0]), SamplingParams(top_k=2))
    assert (probs > 0).tolist() == [True, True, True, False]


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    """With .5 .3 .2 and top_p .6, the second token stays and the third goes."""
    probs = target_distribution(torch.tensor([0.5, 0.3, 0.2]).log(), SamplingParams(top_p=0.6))
    assert probs.tolist() == pytest.approx([0.625, 0.375, 0.0])


def test_order_matters_and_is_followed() -> None:
    """Min-p before a high temperature removes tokens that it keeps after it."""
    logits = torch.tensor([2.0, 0.0])
    last = SamplingParams(temperature=4.0, min_p=0.3)
    first = SamplingParams(temperature=4.0, min_p=0.3, order=("min_p", "temperature", "top_k", "top_p"))
    assert target_distribution(logits, last)[1] > 0.3
    assert target_distribution(logits, first)[1] == 0


def test_temperature_zero_is_the_lowest_of_the_most_likely() -> None:
    """At temperature 0 all mass is on the largest logit, on the lowest id if several tie."""
    logits = torch.tensor([[0.0, 5.0, 5.0], [1.0, 0.0, -1.0]])
    for other in ({}, {"top_k": 2}, {"top_p": 0.1}, {"min_p": 0.5}):
        probs = target_distribution(logits, SamplingParams(temperature=0.0, **other))
        assert probs.tolist() == [[0, 1, 0], [1, 0, 0]]


def test_masked_tokens_stay_impossible_and_broken_logits_are_refused() -> None:
    """-inf is probability 0; NaN, +inf or an empty support is a model error."""
    probs = target_distribution(torch.tensor([0.0, -math.inf, 0.0]), SamplingParams(top_p=0.99, top_k=3))
    assert probs.tolist() == [0.5, 0.0, 0.5]
    for broken in ([0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]):
        with pytest.raises(ModelError, match="not finite"):
            target_distribution(torch.tensor(broken), SamplingParams())


def test_the_oracle_shares_no_code_with_the_decoder() -> None:
    """Its file imports nothing of specbench but records, errors and the table it fills."""
    tree = ast.parse(Path(reference.__file__).read_text(encoding="utf-8"))
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    ours = {module for module in modules if module is not None and module.startswith("specbench")}
    assert ours == {"specbench.audit.chi_squared", "specbench.errors", "specbench.records"}


# The oracle


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_ragged_sequences_are_scored_as_if_alone(family: str) -> None:
    """Lengths and batching do not matter, and the result keeps the order of the sequences."""
    model = tiny_model(family)
    sampling = SamplingParams(temperature=0.8, top_p=0.9)
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, VOCAB, length).tolist() for length in (3, 7, 3, 1, 7, 7, 12)]
    together = Oracle(model, sampling, batch_tokens=15).next_distributions(sequences)
    for sequence, probs in zip(sequences, together, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([sequence]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(probs, target_distribution(logits, sampling), atol=1e-6, rtol=1e-5)
    assert Oracle(model, sampling).next_distributions([]).shape[0] == 0


def enumerated(
    model: PreTrainedModel, sampling: SamplingParams, horizon: int, ends: tuple[int, ...]
) -> dict[Continuation, float]:
    """Return the law of continuations by scoring every sequence of tokens, all its positions at once."""
    every = list(itertools.product(range(VOCAB), repeat=horizon))
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens for tokens in every]), use_cache=False).logits
    probs = target_distribution(logits[:, len(PROMPT) - 1 : -1], sampling)
    steps = probs.gather(-1, torch.tensor(every).unsqueeze(-1)).squeeze(-1).tolist()
    law: dict[Continuation, float] = {}
    for tokens, factors in zip(every, steps, strict=True):
        length = next((place + 1 for place, token in enumerate(tokens) if token in ends), horizon)
        law[tokens[:length]] = math.prod(factors[:length])
    return {key: probability for key, probability in law.items() if probability > 0}


@pytest.mark.parametrize(("family", "ends"), [("llama", (2,)), ("gpt2", (2, 7, 11)), ("gpt2", ())])
def test_the_law_is_the_one_found_by_enumeration(family: str, ends: tuple[int, ...]) -> None:
    """Walking the tree finds every possible continuation with its joint probability, up to and with EOS."""
    sampling = SamplingParams(temperature=1.5, top_p=0.97)
    model = tiny_model(family)
    oracle = Oracle(model, sampling, ends, batch_tokens=200)
    law = oracle.continuation_law(PROMPT, 3)
    expected = enumerated(model, sampling, 3, ends)
    assert law.truncated == frozenset()
    assert law.continuations.keys() == expected.keys()
    for key, probability in expected.items():
        assert law.continuations[key] == pytest.approx(probability, rel=1e-5, abs=1e-12)
    assert math.fsum(law.continuations.values()) == pytest.approx(1, abs=1e-12)


def test_what_ends_a_continuation(llama: PreTrainedModel) -> None:
    """EOS ends it unless ignored; a stop id of the request ends it in any case."""

    def lengths(sampling: SamplingParams) -> set[int]:
        law = Oracle(llama, sampling, eos_ids=(2,)).continuation_law(PROMPT, 2)
        return {key[0] for key in law.continuations if len(key) == 1}

    assert lengths(SamplingParams()) == {2}
    assert lengths(SamplingParams(ignore_eos=True)) == set()
    assert lengths(SamplingParams(ignore_eos=True, stop_token_ids=(4,))) == {4}
    assert lengths(SamplingParams(stop_token_ids=(4,))) == {2, 4}


def test_greedy_has_one_continuation(llama: PreTrainedModel) -> None:
    """At temperature 0 the law is the point mass on what greedy `generate` emits."""
    law = Oracle(llama, SamplingParams(temperature=0.0)).continuation_law(PROMPT, 6)
    greedy = llama.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=6, pad_token_id=0, attention_mask=ONES
    )
    assert dict(law.continuations) == {tuple(greedy[0, len(PROMPT) :].tolist()): 1.0}


def test_pruning_changes_no_cell(llama: PreTrainedModel) -> None:
    """With a floor of 10 / N the pooled table of N draws is the one without a floor, at fewer forwards."""
    sampling = SamplingParams(temperature=1.5, top_k=4)
    oracle = Oracle(llama, sampling, eos_ids=(2,))
    num = 1000

    def walk(floor: float) -> tuple[ExpectedTable, int]:
        """Return the law, and the prefixes scored according to the progress reports."""
        calls: list[tuple[int, int, int]] = []
        law = oracle.continuation_law(PROMPT, 5, floor=floor, progress=lambda *call: calls.append(call))
        totals = {depth: total for depth, _, total in calls}
        assert list(totals) == [1, 2, 3, 4, 5]
        assert all((depth, total, total) in calls for depth, total in totals.items())
        return law, sum(totals.values())

    (full, all_prefixes), (pruned, few_prefixes) = walk(0.0), walk(10 / num)
    assert len(pruned.truncated) > 10
    assert math.fsum(pruned.continuations.values()) == pytest.approx(1, abs=1e-12)
    assert few_prefixes < all_prefixes / 3
    keys, probabilities = list(full.continuations), list(full.continuations.values())
    chosen = np.random.default_rng(0).choice(len(keys), num, p=probabilities)
    draws = [keys[place] for place in chosen]
    results = [
        judge([(law, draws)], alpha=0.01, generator=np.random.default_rng(1)) for law in (full, pruned)
    ]
    assert results[0].df > 10
    for one, other in zip(results[0].cells[0], results[1].cells[0], strict=True):
        assert one.continuation == other.continuation
        assert one.expected == pytest.approx(other.expected, rel=1e-5)
        assert one.observed == other.observed


def test_what_cannot_be_computed_is_refused(llama: PreTrainedModel) -> None:
    """Too large a table, too long a horizon, an empty prompt or active dropout is an error with a reason."""
    with pytest.raises(UsageError, match="more than 200 continuations") as caught:
        Oracle(llama, SamplingParams()).continuation_law(PROMPT, 4, max_leaves=200)
    assert "top_k" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="horizon is 4"):
        Oracle(llama, SamplingParams(max_new_tokens=3)).continuation_law(PROMPT, 4)
    with pytest.raises(UsageError, match="empty"):
        Oracle(llama, SamplingParams()).continuation_law((), 4)
    with pytest.raises(UsageError, match="training"):
        Oracle(tiny_model("llama").train(), SamplingParams())


# Against `generate`

ONES = torch.ones(1, len(PROMPT), dtype=torch.long)


def generated(
    model: PreTrainedModel, num: int, horizon: int, eos: int, **sampling: float
) -> list[Continuation]:
    """Draw continuations with transformers' `generate`, cut after EOS."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        output = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=ONES,
            do_sample=True,
            num_return_sequences=num,
            max_new_tokens=horizon,
            eos_token_id=eos,
            pad_token_id=eos,
            **sampling,
        )
    continuations = []
    for row in output[:, len(PROMPT) :].tolist():
        cut = row.index(eos) + 1 if eos in row else len(row)
        continuations.append(tuple(row[:cut]))
    return continuations


def test_generate_passes_and_a_wrong_temperature_fails(llama: PreTrainedModel) -> None:
    """What `generate` samples follows the law; the same draws fail against the law of another temperature."""
    eos = 7
    draws = generated(llama, 6000, 5, eos, temperature=1.2, top_k=3)
    assert sum(len(draw) < 5 for draw in draws) > 100
    verdicts = []
    for temperature in (1.2, 1.5):
        oracle = Oracle(llama, SamplingParams(temperature=temperature, top_k=3), eos_ids=(eos,))
        law = oracle.continuation_law(PROMPT, 5)
        result = judge([(law, draws)], alpha=1e-3, generator=np.random.default_rng(0))
        assert result.out_of_support == 0
        assert result.df > 20
        verdicts.append(result.is_rejected)
    assert verdicts == [False, True]
