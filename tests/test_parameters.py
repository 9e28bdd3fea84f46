"""What a request may ask for holds in every row of the window: penalties, bans, lengths, stops, logprobs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONTEXT, VOCAB, Served, collect, copied, greedy, perturbed, requests, shared, uncached
from torch import Tensor

from specbench.audit.chi_squared import judge
from specbench.audit.reference import Oracle, adjusted, target_distribution
from specbench.decoding.processing import History, SamplingTensors, ancestors, process
from specbench.engines.local import LocalEngine
from specbench.errors import UsageError
from specbench.records import Request, SamplingParams, Schedule, samples, sampling_from
from specbench.runtime.stop_strings import StopStrings

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
PROMPTS = (PROMPT, (2,), (7, 7, 8, 9, 3, 7, 7, 8, 9, 3, 7, 7), (16, 0, 16), (4, 4, 4, 4, 4, 4))

ASKED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.6},
    "encouraged": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -0.3},
    "bias": {"logit_bias": ((3, 4.0), (7, -100.0), (11, 100.0))},
    "bias small": {"logit_bias": ((3, 1.0), (7, -2.0))},
    "bad words": {"bad_words": ((5,), (1, 4), (3, 7, 7), (9,))},
    "least length": {"min_new_tokens": 9},
    "together": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
        "bad_words": ((1, 4), (6,)),
        "logit_bias": ((2, 1.0),),
        "min_new_tokens": 5,
        "top_k": 6,
    },
}
SPECS = ("ordinary", "ngram:k=3,min=1", "early-exit:layers=2,k=3", "draft:k=3", "draft:topk=2,depth=3")
EOS = (12, 3)

asked = pytest.mark.parametrize("kind", ASKED)
every = pytest.mark.parametrize("spec", SPECS)


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    """An engine whose draft resembles its target; texts are letters, one per token."""
    return LocalEngine(
        copied(shared("llama"), "sdpa"),
        eos_ids=EOS,
        draft=perturbed(shared("llama"), 0.1),
        tokenizer=SimpleNamespace(decode=lambda tokens, **_: letters(tokens)),
        rows=6,
        width=CONTEXT,
    )


def letters(tokens: Sequence[int]) -> str:
    """Decode token 0 as a, 1 as b, and so on."""
    return "".join(chr(97 + token) for token in tokens)


def serve(engine: LocalEngine, spec: str, offered: Sequence[Request], **schedule: Any) -> Served:
    """Serve requests, 4 at a time."""
    engine.open(spec)
    return collect(engine.serve(Schedule(tuple(offered), **{"concurrency": 4, **schedule})))


# Rows of the window


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[SamplingParams], list[list[int]], list[int], Tensor]:
    """Draw unlike parameters, texts and trees for a batch."""
    batch, num = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    kinds = [draw(st.sampled_from(sorted(ASKED))) for _ in range(batch)]
    params = [SamplingParams(**ASKED[kind], stop_token_ids=(8,)) for kind in kinds]
    token = st.integers(0, VOCAB - 1)
    texts = [draw(st.lists(token, min_size=1, max_size=8)) for _ in range(batch)]
    prompts = [draw(st.integers(1, len(text))) for text in texts]
    parents = [[draw(st.integers(-1, node - 1)) for node in range(num)] for _ in range(batch)]
    return params, texts, prompts, torch.tensor(parents, dtype=torch.int64).reshape(batch, num)


@settings(max_examples=60)
@given(window=windows(), seed=st.integers(0, 1000))
def test_every_node_sees_its_own_ancestors(
    window: tuple[list[SamplingParams], list[list[int]], list[int], Tensor], seed: int
) -> None:
    """Each row of a tree's window is processed as if its own path had been committed."""
    params, texts, prompts, parents = window
    generator = torch.Generator().manual_seed(seed)
    batch, num = parents.shape
    logits = 3 * torch.randn(batch, num + 1, VOCAB, generator=generator, dtype=torch.float64)
    nodes = torch.randint(VOCAB, (batch, num), generator=generator)
    sampling = SamplingTensors.of(params, eos_ids=EOS)
    p = process(logits, sampling, History(texts, prompts, nodes, ancestors(parents))).to_dense(VOCAB)
    for row in range(batch):
        for place in range(num + 1):
            node, path = place - 1, list[int]()
            while node >= 0:
                path.insert(0, int(nodes[row, node]))
                node = int(parents[row, node])
            text, start = texts[row], prompts[row]
            scores = adjusted(
                logits[row, place], params[row], text[:start], [*text[start:], *path], (8, *EOS)
            )
            expected = target_distribution(scores, params[row])
            torch.testing.assert_close(p[row, place], expected, atol=1e-9, rtol=1e-6)


def test_history_is_asked_for() -> None:
    """Processing that cannot know the history refuses, rather than leaving a penalty out."""
    sampling = SamplingTensors.of([SamplingParams(presence_penalty=1.0)])
    with pytest.raises(ValueError, match="history"):
        process(torch.zeros(1, 1, VOCAB), sampling)


# Ordinary decoding is `generate`


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.6}, {"repetition_penalty": 1.6}),
        ({"bad_words": ((5,), (1, 4), (3, 7, 7))}, {"bad_words_ids": [[5], [1, 4], [3, 7, 7]]}),
        ({"logit_bias": ((3, 2.0), (7, -5.0))}, {"sequence_bias": {(3,): 2.0, (7,): -5.0}}),
        ({"min_new_tokens": 7}, {"min_new_tokens": 7}),
        ({"max_new_tokens": 5}, {"max_new_tokens": 5}),
    ],
    ids=lambda value: "+".join(value),
)
def test_ordinary_decoding_agrees_with_generate(
    engine: LocalEngine, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Greedy, with the same parameter, token for token."""
    served = serve(engine, "ordinary", requests(PROMPTS, temperature=0.0, **{"max_new_tokens": 16, **ours}))
    model = shared("llama")
    for prompt, output in zip(PROMPTS, served.outputs, strict=True):
        generated = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            eos_token_id=list(EOS),
            pad_token_id=0,
            **{"max_new_tokens": 16, **theirs},
        )
        assert output == generated[0, len(prompt) :].tolist()


# Speculation changes nothing


def plain_greedy(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Decode greedily by uncached forwards and the oracle's own processing."""
    output: list[int] = []
    while len(output) < params.max_new_tokens and not (output and output[-1] in EOS):
        logits = uncached(shared("llama"), [*prompt, *output])[-1]
        output.append(int(adjusted(logits, params, prompt, output, EOS).argmax()))
    return output


@asked
@every
def test_greedy_output_is_the_oracles(engine: LocalEngine, spec: str, kind: str) -> None:
    """At temperature 0 every strategy emits what plain decoding under the same parameters does."""
    offered = requests(PROMPTS, temperature=0.0, max_new_tokens=18, **ASKED[kind])
    served = serve(engine, spec, offered)
    assert served.outputs == [plain_greedy(request.prompt, request.sampling) for request in offered]


@asked
@pytest.mark.parametrize("spec", [s for s in SPECS if s != "ordinary"])
def test_exact_match_equals_ordinary_decoding(engine: LocalEngine, spec: str, kind: str) -> None:
    """Under one seed, sampled, token for token."""
    offered = requests(PROMPTS, temperature=1.0, max_new_tokens=14, **ASKED[kind])
    ordinary = serve(engine, "ordinary", offered).outputs
    exact = spec + (",verify=exact" if ":" in spec else ":verify=exact")
    assert serve(engine, exact, offered).outputs == ordinary


def test_unlike_requests_in_one_batch(engine: LocalEngine) -> None:
    """Requests of unlike parameters, together and alone, give the same."""
    offered = [
        dataclasses.replace(request, id=index, sampling=dataclasses.replace(request.sampling, seed=index))
        for index, kind in enumerate(ASKED)
        for request in requests([PROMPTS[index % len(PROMPTS)]], max_new_tokens=12, **ASKED[kind])
    ]
    together = serve(engine, "draft:k=3", offered)
    for request in offered:
        alone = serve(engine, "draft:k=3", [request])
        assert alone.records[request.id].output_tokens == together.records[request.id].output_tokens


@pytest.mark.parametrize("kind", ["presence", "repetition", "together"])
@pytest.mark.parametrize("spec", ["draft:k=2", "ngram:k=2,min=1", "draft:topk=2,depth=2"])
def test_distribution_under_penalties(engine: LocalEngine, spec: str, kind: str) -> None:
    """Whole continuations follow the exact law of the penalised target."""
    params = SamplingParams(**{"top_k": 3, **ASKED[kind], "max_new_tokens": 5})
    law = Oracle(shared("llama"), params, EOS).continuation_law(PROMPT, 5)
    offered = requests([PROMPT] * 2500, **{"top_k": 3, **ASKED[kind]}, max_new_tokens=5)
    served = serve(engine, spec, offered, share_prefill=True, concurrency=6)
    drawn = [tuple(output) for output in served.outputs]
    result = judge([(law, drawn)], alpha=1e-4, generator=np.random.default_rng(5))
    assert result.is_rejected is False
    assert sum(entry.drafted for entry in served.rounds) > 0


def test_a_penalty_left_out_of_the_draft_rows_is_found(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same test fails a loop that shows every row the committed tokens only."""
    original = History.of_chain.__func__  # type: ignore[attr-defined]

    def forgetful(cls: type[History], *arguments: Any) -> History:
        history: History = original(cls, *arguments)
        return dataclasses.replace(history, ancestors=torch.zeros_like(history.ancestors))

    monkeypatch.setattr(History, "of_chain", classmethod(forgetful))
    kind = {"top_k": 3, **ASKED["presence"]}
    law = Oracle(shared("llama"), SamplingParams(**kind, max_new_tokens=5), EOS).continuation_law(PROMPT, 5)
    served = serve(
        engine,
        "draft:k=3",
        requests([PROMPT] * 2500, **kind, max_new_tokens=5),
        share_prefill=True,
        concurrency=6,
    )
    result = judge(
        [(law, [tuple(o) for o in served.outputs])], alpha=1e-4, generator=np.random.default_rng(5)
    )
    assert result.is_rejected


# What ends a request


@every
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_stop_strings_are_found_across_chunks(engine: LocalEngine, spec: str, length: int) -> None:
    """The output ends with the token that completes the string, wherever chunks ended."""
    for prompt in PROMPTS:
        text = letters(greedy(shared("llama"), prompt, 20))
        for start in range(0, 15, 4):
            stop = text[start : start + length]
            served = serve(
                engine,
                spec,
                requests([prompt], temperature=0.0, ignore_eos=True, max_new_tokens=20, stop_strings=(stop,)),
            )
            assert letters(served.outputs[0]) == text[: text.index(stop) + length]
            assert served.reasons == ["stop"]


def test_stop_strings_wait_for_the_least_length(engine: LocalEngine) -> None:
    """What ends before min_new_tokens does not stop the request."""
    text = letters(greedy(shared("llama"), PROMPT, 20))
    first = text[2]
    served = serve(
        engine,
        "draft:k=3",
        requests(
            [PROMPT], temperature=0.0, ignore_eos=True, max_new_tokens=20, stop_strings=(first, text[12:15]),
            min_new_tokens=len(text),
        ),
    )  # fmt: skip
    assert letters(served.outputs[0]) == text


def test_stop_strings_in_a_character_of_several_tokens() -> None:
    """Bytes of one character decode to a replacement until it is whole; the string is found then."""
    pieces = [b"caf", "é".encode()[:1], "é".encode()[1:], b" noir"]

    def decode(tokens: Sequence[int]) -> str:
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    watch = StopStrings(["é n"], decode, prompt=[0])
    assert watch([0, 1]) is None
    assert watch([2, 3, 0]) == 2


def test_stop_strings_need_text() -> None:
    """An engine without a tokenizer says so."""
    silent = LocalEngine(copied(shared("llama"), "sdpa"), eos_ids=(), rows=1, width=CONTEXT)
    with pytest.raises(UsageError, match="stop strings"):
        serve(silent, "ordinary", requests([PROMPT], stop_strings=("x",)))


# Samples and log-probabilities


def test_samples_share_a_prefill_and_no_stream(engine: LocalEngine) -> None:
    """N samples of a prompt: one prefill, distinct outputs, the first as if it were alone."""
    request = requests([PROMPT], max_new_tokens=16, ignore_eos=True)[0]
    served = serve(engine, "draft:k=3", samples(request, 6), share_prefill=True, concurrency=6)
    prefills = [step for step in served.steps if step.phase == "prefill"]
    assert [step.tokens_in for step in prefills] == [len(PROMPT)]
    assert len({tuple(output) for output in served.outputs}) == 6
    assert serve(engine, "draft:k=3", [request]).outputs[0] == served.outputs[0]


@every
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_are_those_of_the_emitted_tokens(engine: LocalEngine, spec: str, temperature: float) -> None:
    """Raw and processed, of the token and of the top n, at the row that emitted it."""
    offered = requests(
        PROMPTS, temperature=temperature, top_k=5, presence_penalty=0.5, max_new_tokens=12, logprobs=3
    )
    served = serve(engine, spec, offered)
    for request in offered:
        record = served.records[request.id]
        assert record.logprobs is not None
        assert len(record.logprobs) == len(record.output_tokens)
        for place, (token, found) in enumerate(zip(record.output_tokens, record.logprobs, strict=True)):
            before = record.output_tokens[:place]
            logits = uncached(shared("llama"), [*request.prompt, *before])[-1]
            raw = logits.log_softmax(-1)
            scores = adjusted(logits, request.sampling, request.prompt, before, EOS)
            processed = target_distribution(scores, request.sampling).log()
            assert found.raw == pytest.approx(float(raw[token]), abs=1e-4)
            assert found.processed == pytest.approx(float(processed[token]), abs=1e-4)
            best = raw.topk(3)
            assert [entry[0] for entry in found.top_raw] == best.indices.tolist()
            assert [entry[1] for entry in found.top_raw] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert len(found.top_processed) == (1 if temperature == 0 else 3)


def test_logprobs_are_not_recorded_unasked(engine: LocalEngine) -> None:
    """Nothing is computed that nobody wants."""
    record = serve(engine, "draft:k=3", requests([PROMPT], max_new_tokens=4)).records[0]
    assert record.logprobs is None


# Bad input


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"logit_bias": ((1, float("inf")),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        ({"stop_strings": ("",)}, "stop_strings"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logprobs": -1}, "logprobs"),
    ],
)
def test_meaningless_parameters_are_refused(wrong: dict[str, Any], named: str) -> None:
    """One line names the parameter and what was expected."""
    with pytest.raises(ValueError, match=f"{named} is .*; expected"):
        SamplingParams(**wrong)


def test_ids_beyond_the_vocabulary_are_refused(engine: LocalEngine) -> None:
    """A bias on a token the model does not have is a mistake, not a no-op."""
    for wrong in (
        {"logit_bias": ((VOCAB, 1.0),)},
        {"bad_words": ((1, VOCAB),)},
        {"stop_token_ids": (VOCAB,)},
    ):
        with pytest.raises(UsageError, match=f"token {VOCAB}"):
            serve(engine, "ordinary", requests([PROMPT], **wrong))


def test_parameters_survive_being_stored() -> None:
    """What was asked for is what is read back."""
    params = SamplingParams(**ASKED["together"], stop_strings=("a",), logprobs=2)
    stored = json.loads(json.dumps(dataclasses.asdict(params)))
    assert sampling_from(stored) == params
