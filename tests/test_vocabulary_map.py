"""A draft whose ids are not the target's: the map by strings, on which acceptance alone depends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from conftest import WORDS, save
from test_models import make_tokenizer
from tiny_models import CONTEXT, VOCAB, Served, build, collect, copied, greedy, perturbed, requests, shared

from specbench.audit.chi_squared import judge
from specbench.audit.reference import Oracle
from specbench.cli import main
from specbench.engines.local import LocalEngine
from specbench.errors import IncompatibleError
from specbench.models import fit_vocabulary
from specbench.models.vocabulary import map_vocabulary
from specbench.records import Request, SamplingParams, Schedule
from specbench.strategies._vocabulary import DraftVocabulary

LETTERS = ["<eos>", *"abcdefghij"]


def fitted(target: Sequence[str], draft: Sequence[str], **sizes: int) -> tuple[int, ...] | None:
    """Fit two vocabularies of words whose ids are their places."""
    return fit_vocabulary(
        make_tokenizer(list(target)),
        make_tokenizer(list(draft)),
        target_vocab=sizes.get("target_vocab", len(target)),
        draft_vocab=sizes.get("draft_vocab", len(draft)),
    )


# --- which token is which ---------------------------------------------------------------------


def test_equal_ids_need_no_map() -> None:
    """The same tokens under the same ids give None, whatever the padding of the heads."""
    assert fitted(LETTERS, LETTERS) is None
    assert fitted(LETTERS, LETTERS, target_vocab=16, draft_vocab=12) is None


def test_another_order_is_mapped_by_strings() -> None:
    """Each draft id gets the target's id of its string; rows of padding get none."""
    ids = fitted(LETTERS, LETTERS[::-1], draft_vocab=13)
    assert ids == (10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, -1, -1)


def test_a_part_is_mapped_and_strangers_are_left_out() -> None:
    """Tokens that only the draft has get -1; those that only the target has appear nowhere."""
    assert fitted(LETTERS, ["<eos>", "c", "zebra", "a"]) == (0, 3, -1, 1)


def test_ids_beyond_a_head_are_not_mapped() -> None:
    """A string whose id has no row in a model's head cannot be drafted, nor drafted for."""
    assert fitted(LETTERS, ["<eos>", "j", "a", "b"], target_vocab=9) == (0, -1, 1, 2)
    assert fitted(LETTERS, ["<eos>", "b", "a", "j"], draft_vocab=3) == (0, 2, 1)


def test_too_few_shared_tokens_are_refused_in_one_line() -> None:
    """With less than half of the draft's tokens in the target the pair is refused, with both reasons."""
    assert fitted(LETTERS, ["<eos>", "b", "X", "Y"]) == (0, 2, -1, -1)
    with pytest.raises(IncompatibleError) as caught:
        fitted(LETTERS, ["<eos>", "X", "Y", "Z", "a"])
    assert "shared ids differ" in caught.value.message
    assert "the target has 2 of the draft's 5 tokens" in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint
    with pytest.raises(IncompatibleError, match="too few to map"):
        map_vocabulary(make_tokenizer(LETTERS), make_tokenizer(["x", "y"]), target_vocab=11, draft_vocab=2)


OFFSETS = tuple((3 * own) % VOCAB - own for own in range(VOCAB))
"""A table of differences, as some checkpoints store their map: the target's id minus the draft's own."""


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        ([0] * 6, "two draft tokens one id"),
        ([2, 1, 2], "two draft tokens one id"),
        ([0, 1, 8], "to target token 8; the models have 6 and 8 tokens"),
        ([-1, 0, 1, 2, 3, 4, 5], "from draft token 6"),
        ([-1, -1], "empty"),
        ([0, -2, 1], "holds -2"),
    ],
)
def test_what_is_no_map_is_refused(ids: list[int], what: str) -> None:
    """Ids that a model lacks, and one target token for two of the draft's, are refused in one line."""
    with pytest.raises(IncompatibleError, match=what) as caught:
        DraftVocabulary(8, 6, ids)
    assert "\n" not in caught.value.message
    assert "not differences" in (caught.value.hint or "")


def test_logits_and_tokens_are_translated_there_and_back() -> None:
    """Target tokens get the logits of their draft ids, others -inf; what the draft lacks reads as its 0."""
    vocabulary = DraftVocabulary(5, 4, [3, -1, 0, 2])
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert vocabulary.logits(logits).tolist() == [[3.0, -torch.inf, 4.0, 1.0, -torch.inf]]
    assert vocabulary.read([3, 0, 2, 1, 4]) == [0, 2, 3, 0, 0]
    assert vocabulary.read_drafts(torch.tensor([[3, 0, 2]])).tolist() == [[0, 2, 3]]


# --- decoding ---------------------------------------------------------------------------------


def rearranged(model: Any, ids: Sequence[int]) -> Any:
    """Return a model whose token i is token `ids[i]` of another: its rows taken in that order."""
    twin = build("llama", vocab_size=len(ids), num_hidden_layers=model.config.num_hidden_layers)
    state = model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][list(ids)]
    twin.load_state_dict(state)
    return twin


def permutation(num: int) -> tuple[int, ...]:
    """Return a permutation that moves nearly every id."""
    return tuple(torch.randperm(num, generator=torch.Generator().manual_seed(3)).tolist())


MAPS = {"permuted": permutation(VOCAB), "part": tuple(permutation(VOCAB)[:11])}
SPECS = ("draft:k=3", "draft:topk=2,depth=3", "draft:k=4,policy=confidence(threshold=0.3)")
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (2,), (16, 0, 16), (7, 7, 8, 9, 3, 7, 7, 8, 9, 3, 7))


def engine_for(ids: Sequence[int], *, target: Any = None, given: Any = None, rows: int = 8) -> LocalEngine:
    """Return an engine whose draft resembles its target under other ids; `given` is the map it is told."""
    target = target if target is not None else shared("llama")
    draft = rearranged(perturbed(target, 0.1), ids)
    return LocalEngine(
        copied(target, "sdpa"),
        eos_ids=(),
        draft=draft,
        draft_ids=given if given is not None else ids,
        rows=rows,
        width=CONTEXT,
    )


def serve(engine: LocalEngine, spec: str, offered: Sequence[Request], **options: Any) -> Served:
    """Serve requests with a strategy, 3 at a time unless told otherwise."""
    engine.open(spec)
    return collect(engine.serve(Schedule(tuple(offered), **{"concurrency": 3, **options})))


def accepted(served: Served) -> float:
    """Return the share of drafted tokens that were accepted."""
    return sum(r.accepted for r in served.rounds) / sum(r.draft_depth for r in served.rounds)


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("spec", SPECS)
def test_greedy_output_is_the_oracles(spec: str, kind: str) -> None:
    """At temperature 0 a mapped draft changes nothing, and drafts what it would draft under equal ids."""
    engine = engine_for(MAPS[kind])
    offered = requests(PROMPTS, temperature=0.0, max_new_tokens=20)
    served = serve(engine, spec, offered, record_drafts=True)
    assert served.outputs == [greedy(shared("llama"), prompt, 20) for prompt in PROMPTS]
    offers = {token for entry in served.rounds for token in entry.draft_tokens or ()}
    assert offers <= set(MAPS[kind])
    if kind == "permuted":
        same = LocalEngine(
            copied(shared("llama"), "sdpa"),
            eos_ids=(),
            draft=perturbed(shared("llama"), 0.1),
            rows=8,
            width=96,
        )
        twin = serve(same, spec, offered, record_drafts=True)
        assert [entry.draft_tokens for entry in served.rounds] == [e.draft_tokens for e in twin.rounds]


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
)


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("spec", ["draft:k=3,verify=exact", "draft:topk=2,depth=3,verify=exact"])
def test_exact_match_is_ordinary_decoding_token_for_token(spec: str, kind: str) -> None:
    """Verified by exact match, a mapped draft emits under one seed what ordinary decoding emits."""
    engine = engine_for(MAPS[kind])
    offered = [
        replace(request, sampling=replace(request.sampling, **changes))
        for request, changes in zip(requests(PROMPTS, max_new_tokens=20), KINDS, strict=True)
    ]
    assert serve(engine, spec, offered).outputs == serve(engine, "ordinary", offered).outputs


def test_a_wrong_map_is_found_by_its_acceptance() -> None:
    """Another permutation than the right one is lossless too, and shows: hardly a draft is accepted."""
    offered = requests(PROMPTS * 2, temperature=0.0, max_new_tokens=24)
    right = serve(engine_for(MAPS["permuted"]), "draft:k=3", offered)
    wrong = serve(engine_for(MAPS["permuted"], given=MAPS["permuted"][::-1]), "draft:k=3", offered)
    assert wrong.outputs == right.outputs
    assert accepted(right) > 2 * accepted(wrong)


def test_offsets_taken_for_ids_are_refused() -> None:
    """A table of differences cannot pass for a map of ids."""
    engine = engine_for(MAPS["permuted"], given=OFFSETS)
    with pytest.raises(IncompatibleError, match="vocabulary map"):
        engine.open("draft:k=3")


SMALL = 8
DRAWS = 1000
ALPHA = 1e-4


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 1.3, "top_k": 5, "frequency_penalty": 0.6, "logit_bias": ((2, -1.0),)},
    ],
    ids=["plain", "processed"],
)
@pytest.mark.parametrize("ids", [permutation(SMALL), permutation(SMALL)[:5]], ids=["permuted", "part"])
@pytest.mark.parametrize("spec", ["draft:k=2", "draft:topk=2,depth=2"])
def test_whole_continuations_follow_the_targets_law(
    spec: str, ids: tuple[int, ...], sampling: dict[str, Any]
) -> None:
    """2,000 continuations of 5 tokens pass a chi-squared test; drafts were accepted and rejected."""
    target = build("llama", vocab_size=SMALL, head=0.3)
    engine = engine_for(ids, target=target, rows=250)
    params = SamplingParams(max_new_tokens=5, **sampling)
    tables = []
    rounds = []
    for number, prompt in enumerate(((1, 2, 3, 1, 2), (4,))):
        offered = [Request(i, prompt, replace(params, seed=99 + number * DRAWS + i)) for i in range(DRAWS)]
        served = serve(engine, spec, offered, concurrency=250, share_prefill=True)
        law = Oracle(target, params).continuation_law(prompt, 5, floor=10 / DRAWS)
        tables.append((law, [tuple(output) for output in served.outputs]))
        rounds += [entry for entry in served.rounds if entry.draft_depth == 2]
    result = judge(tables, alpha=ALPHA, generator=np.random.default_rng(1))
    assert result.out_of_support == 0
    assert result.is_rejected is False, (result.p_value, result.tv_observed)
    assert result.smallest_detectable_tv is not None
    assert result.smallest_detectable_tv < 0.15
    kinds = {(entry.accepted == 0, entry.rejected) for entry in rounds}
    assert {(True, True), (False, True), (False, False)} <= kinds


# --- from the command line --------------------------------------------------------------------


def measure(folder: Path, draft: Path) -> int:
    """Run the tiny saved model with a draft."""
    (folder / "prompts.txt").write_text("abcabcab\n", encoding="utf-8")
    options = ["--strategy", "draft:k=2", "--no-audit", "--max-new-tokens", "6", "--temperature", "0"]
    places = ["--workload", str(folder / "prompts.txt"), "--output", str(folder / "results")]
    return main(
        ["run", "--target", str(folder / "models" / "target"), "--draft", str(draft), *places, *options]
    )


def test_a_run_says_that_it_maps(
    saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft with the same words in another order is measured, and the map is told while loading."""
    monkeypatch.setattr("conftest.WORDS", ("<eos>", "<unk>", *reversed(WORDS[2:])))
    save(tmp_path / "other", tiny_models.build("llama", vocab_size=len(WORDS), eos_token_id=0))
    assert measure(tmp_path, tmp_path / "other") == 0
    captured = capsys.readouterr()
    assert "24 of its 24 tokens are mapped by their strings" in captured.err
    assert "draft:k=2" in captured.out


def test_a_draft_that_does_not_map_is_refused(
    saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft with other words ends in one line, exit code 2, and no run folder."""
    monkeypatch.setattr("conftest.WORDS", ("<eos>", "<unk>", *(word.upper() for word in WORDS[2:])))
    save(tmp_path / "other", tiny_models.build("llama", vocab_size=len(WORDS), eos_token_id=0))
    assert measure(tmp_path, tmp_path / "other") == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "the target has 2 of the draft's 24 tokens; too few to map one to the other" in errors[0]
    assert captured.out == ""
    assert not list((tmp_path / "results").glob("*/run.json"))
