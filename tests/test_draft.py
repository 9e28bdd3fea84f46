"""Drafting with a second model: its cache after any history, its law, and vocabularies of other sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONTEXT, VOCAB, build, collect, copied, perturbed, requests, shared, uncached

from specbench.audit.chi_squared import judge
from specbench.audit.reference import Oracle, target_distribution
from specbench.decoding.processing import SamplingTensors
from specbench.decoding.random_numbers import RoundRandom, stream_keys
from specbench.engines.local import LocalEngine
from specbench.errors import IncompatibleError
from specbench.records import SamplingParams, Schedule
from specbench.runtime.cache import SlotCache
from specbench.runtime.protocols import DraftContext
from specbench.runtime.runner import ModelRunner
from specbench.strategies.draft import ModelDrafter, Options

Slotted = Callable[[str], Any]


class Drafting:
    """A drafter that is told at random what was accepted, as a step loop would tell it."""

    def __init__(self, model: Any, plain: Any, temperature: float, seed: int) -> None:
        self.model, self.plain = model, plain
        self.params = SamplingParams(temperature=temperature)
        target = ModelRunner(model, SlotCache(1, 1))
        self.drafter = ModelDrafter(ModelRunner(model, SlotCache(5, 80)), target=target, weights=0)
        self.random = random.Random(seed)
        self.texts: list[list[int]] = []
        self.round = 0

    def words(self, low: int, high: int) -> list[int]:
        """Return random tokens."""
        return [self.random.randrange(VOCAB) for _ in range(self.random.randint(low, high))]

    def admit(self, num: int) -> None:
        """Prefill new rows; each emits a token from its prefill."""
        prompts = [self.words(1, 8) for _ in range(num)]
        self.drafter.prefill(len(self.texts), prompts, {})
        self.texts += [prompt + self.words(1, 1) for prompt in prompts]

    def step(self, most: int) -> None:
        """Draft, compare the draft's law with plain forwards, accept some, emit one more token."""
        rows = len(self.texts)
        limits = [self.random.randint(0, most) for _ in range(rows)]
        accepted = [0] * rows
        drafts: list[list[int]] = [[] for _ in range(rows)]
        if any(limits):
            numbers = torch.full((rows,), self.round)
            context = DraftContext(
                self.texts,
                limits,
                SamplingTensors.of([self.params] * rows),
                RoundRandom(stream_keys(list(range(rows))), numbers, numbers),
                slots=[99] * rows,
            )
            proposal = self.drafter.propose(context)
            assert list(proposal.offered) == limits
            laws = proposal.q.to_dense(VOCAB)
            for row, (limit, tokens) in enumerate(zip(limits, proposal.tokens.tolist(), strict=True)):
                drafts[row] = tokens[:limit]
                for depth in range(limit):
                    logits = uncached(self.plain, self.texts[row] + tokens[:depth])[-1]
                    law = target_distribution(logits, self.params)
                    torch.testing.assert_close(laws[row, depth].double(), law, atol=1e-4, rtol=0)
                accepted[row] = self.random.choice([0, limit, self.random.randint(0, limit)])
        self.drafter.commit(accepted, {})
        for row, count in enumerate(accepted):
            self.texts[row] += drafts[row][:count] + self.words(1, 1)
        self.round += 1

    def leave(self) -> None:
        """Take out a row; the last one moves into the gap."""
        index, last = self.random.randrange(len(self.texts)), len(self.texts) - 1
        if index != last:
            self.drafter.fork(last, [index])
            self.texts[index] = self.texts[last]
        self.drafter.release([last])
        self.texts.pop()

    def check(self) -> None:
        """Compare what the drafter says it holds with fresh prefills."""
        assert sorted(self.drafter.held) == list(range(len(self.texts)))
        assert self.drafter.memory().slots == sum(self.drafter.held.values())
        for row, text in enumerate(self.texts):
            held = self.drafter.held[row]
            assert held < len(text)
            fresh = ModelRunner(self.model, SlotCache(1, held))
            fresh.forward(torch.tensor([text[:held]]), [0], [held])
            mine = self.drafter.runner.cache
            for layer, keys in fresh.cache.keys.items():
                values = fresh.cache.values[layer]
                for ours, theirs in ((mine.keys[layer], keys), (mine.values[layer], values)):
                    torch.testing.assert_close(ours[row, :, :held], theirs[0, :, :held], atol=1e-4, rtol=0)


MOVES = st.lists(st.sampled_from(["step", "step", "step", "admit", "leave"]), min_size=1, max_size=7)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral-window"])
@settings(max_examples=12)
@given(
    moves=MOVES, seed=st.integers(0, 9999), most=st.integers(0, 4), temperature=st.sampled_from([0.0, 1.0])
)
def test_the_drafts_cache_is_a_fresh_prefill_after_any_history(
    family: str, moves: list[str], seed: int, most: int, temperature: float
) -> None:
    """Whatever was accepted, the draft's slots hold the committed tokens and its q is its own exact law."""
    drafting = Drafting(slot_model(family), shared(family), temperature, seed)
    drafting.admit(2)
    for move in moves:
        if move == "admit" and len(drafting.texts) < 5:
            drafting.admit(1)
        elif move == "leave" and len(drafting.texts) > 1:
            drafting.leave()
        else:
            drafting.step(most)
        drafting.check()


_slot_models: dict[str, Any] = {}


def slot_model(family: str) -> Any:
    """Return a family's model under the own attention, the same object every time."""
    if family not in _slot_models:
        _slot_models[family] = copied(shared(family), "specbench_slots")
    return _slot_models[family]


def test_catching_up_is_ragged() -> None:
    """After full acceptance a row lacks two tokens, else one; both catch up in one forward."""
    drafting = Drafting(slot_model("llama"), shared("llama"), 0.0, 0)
    drafting.admit(2)
    lengths = [len(text) for text in drafting.texts]
    drafter = drafting.drafter
    numbers = torch.zeros(2).long()
    sampling = SamplingTensors.of([drafting.params] * 2)
    randoms = RoundRandom(stream_keys([0, 1]), numbers, numbers)
    tokens = drafter.propose(
        DraftContext(drafting.texts, [3, 3], sampling, randoms, slots=[9] * 2)
    ).tokens.tolist()
    drafter.commit([3, 1], {})
    for row, kept in enumerate((3, 1)):
        drafting.texts[row] += [*tokens[row][:kept], 5]
    missing = [len(text) - drafter.held[row] for row, text in enumerate(drafting.texts)]
    assert missing == [2, 1]
    assert [drafter.held[row] - lengths[row] for row in range(2)] == [2, 1]
    before = len(drafter.runner.forwards)
    drafter.propose(DraftContext(drafting.texts, [1, 1], sampling, randoms, slots=[9] * 2))
    assert len(drafter.runner.forwards) == before + 1
    drafting.drafter.commit([0, 0], {})
    for text in drafting.texts:
        text.append(6)
    drafting.check()


def engine(target: Any, draft: Any, rows: int = 8) -> LocalEngine:
    return LocalEngine(
        copied(target, "sdpa"), eos_ids=(), draft=copied(draft, "sdpa"), rows=rows, width=CONTEXT
    )


PROMPTS = ((3, 1, 4, 1, 5, 2), (2,), (0, 1, 0, 1, 0))


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_a_model_drafting_for_itself_is_always_accepted(temperature: float) -> None:
    """Draft and target the same: q equals p up to rounding, every token is accepted, k + 1 a step."""
    opened = engine(shared("llama"), shared("llama"))
    opened.open("draft:k=4")
    offered = requests(PROMPTS * 4, temperature=temperature, max_new_tokens=26)
    served = collect(opened.serve(Schedule(offered, concurrency=4)))
    decode = [entry for entry in served.rounds if entry.round]
    assert all(entry.drafted == 4 for entry in decode)  # 26 = 1 + 5 * 5
    assert all(entry.accepted == 4 and not entry.rejected for entry in decode)
    assert len(decode) == 5 * 12


def test_draft_steps_hold_as_many_slots_as_the_texts(slotted: Slotted) -> None:
    """`kv_draft` counts the draft's slots: after the prefill, exactly the prompts."""
    opened = engine(shared("llama"), shared("llama"))
    opened.open("draft:k=2")
    served = collect(opened.serve(Schedule(requests(PROMPTS, max_new_tokens=4), concurrency=3)))
    assert served.steps[0].kv_draft == sum(map(len, PROMPTS))
    assert all(step.kv_draft > 0 for step in served.steps[:-1])


def resized(model: Any, rows: int) -> Any:
    """Return a copy with fewer or more rows in its embedding and head; new rows are likely tokens."""
    twin = copied(model, "sdpa")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        twin.resize_token_embeddings(rows, mean_resizing=False)
        old = model.config.vocab_size
        if rows > old:
            twin.get_output_embeddings().weight.data[old:].normal_(0, 0.6)
    return twin.eval().requires_grad_(False)


SMALL_VOCAB = 8


@pytest.mark.parametrize("verify", ["rejection", "exact"])
@pytest.mark.parametrize("rows", [5, 12])
def test_a_draft_of_another_vocabulary_size_is_lossless(rows: int, verify: str) -> None:
    """A draft that lacks some of the target's tokens, or has more, leaves the target's distribution alone."""
    target = build("llama", vocab_size=SMALL_VOCAB, num_hidden_layers=2, head=0.3)
    opened = engine(target, perturbed(resized(target, rows), 0.1), rows=250)
    opened.open(f"draft:k=2,verify={verify}")
    horizon, draws = 5, 2000
    prompts = [(1, 2, 3, 1, 2), (4,)]
    tables = []
    for number, prompt in enumerate(prompts):
        offered = requests([prompt] * draws, temperature=1.0, max_new_tokens=horizon)
        served = collect(opened.serve(Schedule(offered, concurrency=250, share_prefill=True)))
        params = SamplingParams(temperature=1.0, max_new_tokens=horizon)
        law = Oracle(target, params).continuation_law(prompt, horizon, floor=10 / draws)
        tables.append((law, [tuple(output) for output in served.outputs]))
        drafted = [entry for entry in served.rounds if entry.drafted]
        assert any(entry.rejected for entry in drafted)
        assert any(entry.accepted == 2 for entry in drafted)
        if number == 0:
            # Tokens that the draft does not have are emitted, so that it has to read them.
            assert any(token >= 5 for output in served.outputs for token in output)
    result = judge(tables, alpha=1e-3, generator=np.random.default_rng(0))
    assert result.out_of_support == 0
    assert result.is_rejected is False
    assert result.smallest_detectable_tv is not None
    assert result.smallest_detectable_tv < 0.15


@pytest.mark.parametrize("rows", [9, 30])
def test_greedy_with_a_draft_of_another_vocabulary_size(rows: int) -> None:
    """At temperature 0 the output is the target's, and no token beyond the target's vocabulary is offered."""
    target = shared("llama")
    opened = engine(target, perturbed(resized(target, rows), 0.05))
    offered = requests(PROMPTS, temperature=0.0, max_new_tokens=20)
    outputs = []
    for strategy in ("ordinary", "draft:k=3"):
        opened.open(strategy)
        served = collect(opened.serve(Schedule(offered, concurrency=3, record_drafts=True)))
        outputs.append(served.outputs)
        offers = [token for entry in served.rounds for token in entry.draft_tokens or ()]
        assert all(token < min(VOCAB, rows) for token in offers)
    assert outputs[0] == outputs[1]


def test_a_prompt_with_tokens_that_the_draft_lacks(slotted: Slotted) -> None:
    """A prompt may hold ids beyond the draft's vocabulary: the draft reads something else, losslessly."""
    target = shared("llama")
    opened = engine(target, resized(target, 9))
    prompts: Sequence[Sequence[int]] = [(16, 15, 3, 16), (12,)]
    outputs = []
    for strategy in ("ordinary", "draft:k=3"):
        opened.open(strategy)
        offered = requests(prompts, temperature=0.0, max_new_tokens=12)
        outputs.append(collect(opened.serve(Schedule(offered, concurrency=2))).outputs)
    assert outputs[0] == outputs[1]


def test_no_draft_model_is_an_error_with_a_way_out(slotted: Slotted) -> None:
    """Without a draft model the strategy names the option that gives one."""
    opened = LocalEngine(slotted("llama"), eos_ids=(), rows=2, width=16)
    with pytest.raises(IncompatibleError, match="needs a draft model") as caught:
        opened.open("draft:k=2")
    assert "--draft" in (caught.value.hint or "")


def test_a_draft_of_nothing_is_refused() -> None:
    """K = 0 is refused."""
    with pytest.raises(ValueError, match="at least 1"):
        Options(k=0)
