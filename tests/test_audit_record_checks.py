"""Records of drafts, chunks and endings: consistent ones raise nothing, each contradiction is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specbench.audit.record_checks import contradictions
from specbench.records import RequestRecord, RoundRecord, SamplingParams, StepRecord

EOS = 9
STEP = StepRecord(
    step=1,
    batch=1,
    tokens_in=4,
    tokens_padded=0,
    context_max=3,
    phase="decode",
    started=0.0,
    wall_s=1.0,
    draft_s=None,
    verify_s=None,
    commit_s=None,
    host_s=None,
    forward_s=None,
    dispatch="eager",
    kv_committed=3,
    kv_lookahead=3,
    kv_draft=0,
)
ROUNDS = (
    RoundRecord(0, 0, 0, 0, 0, 0, rejected=False, emitted=1, ended_by="none"),
    RoundRecord(1, 0, 1, 3, 3, 1, True, 2, "budget", (5, 6, 7), (0.5, 0.5, 0.5)),
)
RECORD = RequestRecord(
    request=0,
    prompt_id="",
    prompt_tokens=(1, 2),
    output_tokens=(4, 5, 8),
    sampling=SamplingParams(max_new_tokens=3),
    arrival=0.0,
    first_scheduled=0.0,
    chunk_times=(0.1, 0.2),
    chunk_sizes=(1, 2),
    finished=0.2,
    finish_reason="length",
)


def found(
    step: StepRecord = STEP, last: RoundRecord = ROUNDS[1], record: RequestRecord = RECORD
) -> list[str]:
    return contradictions([step], {0: (ROUNDS[0], last)}, {0: record}, (EOS,))


def test_consistent_records_contradict_nothing() -> None:
    """A chain, its step and its request fit; so do a tree, and an EOS at the end."""
    assert found() == []
    tree = replace(ROUNDS[1], draft_depth=2, draft_parents=(-1, -1, 0))
    assert found(last=tree) == []
    ended = replace(RECORD, output_tokens=(4, 5, EOS), finish_reason="eos")
    assert found(record=ended, last=replace(ROUNDS[1], ended_by="eos")) == []


@pytest.mark.parametrize(
    ("step", "last", "record", "words"),
    [
        ({"tokens_in": 1}, {}, {}, "sent 1 tokens"),
        ({"kv_lookahead": 0}, {}, {}, "holds 0 slots"),
        ({"tokens_in": 3, "kv_lookahead": 2}, {"drafted": 2, "draft_depth": 2}, {}, "counts 2 drafted"),
        ({}, {"draft_depth": 2}, {}, "depth 2"),
        ({}, {"draft_probs": (0.5,)}, {}, "q of 1"),
        ({}, {}, {"chunk_sizes": (1, 1, 1)}, "its rounds emitted 1 2"),
        ({}, {}, {"output_tokens": (4, EOS, 8)}, "goes on behind token 9"),
        ({}, {}, {"output_tokens": (4, 5, EOS)}, "expected 'eos'"),
        ({}, {}, {"finish_reason": "eos"}, "expected 'length'"),
        ({}, {}, {"sampling": SamplingParams(max_new_tokens=4)}, "after 3 tokens of 4"),
        ({}, {}, {"sampling": SamplingParams(max_new_tokens=3, stop_token_ids=(5,))}, "behind token 5"),
    ],
)
def test_each_contradiction_is_named(
    step: dict[str, Any], last: dict[str, Any], record: dict[str, Any], words: str
) -> None:
    """One field that does not fit gives one sentence, which says what."""
    (sentence,) = found(replace(STEP, **step), replace(ROUNDS[1], **last), replace(RECORD, **record))
    assert words in sentence


def test_an_ignored_eos_ends_nothing() -> None:
    """Behind an EOS that the request ignores a text goes on, rightly."""
    ignoring = replace(
        RECORD, output_tokens=(4, EOS, 8), sampling=SamplingParams(max_new_tokens=3, ignore_eos=True)
    )
    assert found(record=ignoring) == []
