"""N-gram drafting: the index against a plain search, examples from vLLM, and what a token costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench.decoding.processing import SamplingTensors
from specbench.decoding.random_numbers import RoundRandom, stream_keys
from specbench.records import SamplingParams
from specbench.runtime.protocols import DraftContext
from specbench.strategies.ngram import NgramDrafter, Options, SuffixIndex


def by_search(tokens: Sequence[int], shortest: int, longest: int, most: int) -> list[int]:
    """Return what followed the longest suffix at its earliest occurrence, by comparing everything."""
    for length in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - length):
            if length and tokens[start : start + length] == tokens[len(tokens) - length :]:
                return list(tokens[start + length : start + length + most])
    return []


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
LENGTHS = st.tuples(st.integers(1, 5), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair)))


@given(TOKENS, LENGTHS, st.integers(1, 6), st.data())
def test_the_index_finds_what_a_search_finds(
    tokens: list[int], lengths: tuple[int, int], most: int, data: Any
) -> None:
    """However a sequence grows, every look-up is that of an exhaustive search."""
    index = SuffixIndex(*lengths)
    end = 0
    while end < len(tokens):
        end = data.draw(st.integers(end + 1, len(tokens)))
        index.extend(tokens[:end])
        assert index.continuation(tokens[:end], most) == by_search(tokens[:end], *lengths, most)


@given(TOKENS, TOKENS, TOKENS)
def test_a_copy_grows_on_its_own(start: list[int], one: list[int], other: list[int]) -> None:
    """What a copy learns stays unknown to the original, and the other way round."""
    index = SuffixIndex(1, 3)
    index.extend(start)
    twin = index.copy()
    index.extend(start + one)
    twin.extend(start + other)
    assert index.continuation(start + one, 4) == by_search(start + one, 1, 3, 4)
    assert twin.continuation(start + other, 4) == by_search(start + other, 1, 3, 4)


@pytest.mark.parametrize(
    ("tokens", "shortest", "longest", "most", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3, 5, 6], 2, 2, 2, []),
        ([1, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3], 2, 2, 2, [4, 1]),
        ([1, 2, 3, 4, 1, 2, 3], 1, 1, 3, [4, 1, 2]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 1, 1, 2, [6, 2]),  # the first match, not the last
        ([1, 2, 3, 4, 1, 2, 3], 3, 4, 2, [4, 1]),  # no 4-gram, but a 3-gram
        ([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], 2, 4, 2, [1, 2]),  # 2-gram and 4-gram: the longer
        ([3, 4, 5, 2, 3, 4, 1, 2, 3, 4], 2, 3, 2, [1, 2]),
        ([5, 1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3], 3, 3, 2, [100, 1]),
        ([7], 1, 3, 2, []),
        ([7, 7], 1, 3, 4, [7]),  # a continuation ends where the text does
    ],
)
def test_examples_of_vllm(
    tokens: list[int], shortest: int, longest: int, most: int, expected: list[int]
) -> None:
    """The examples from the tests of vLLM's n-gram proposer have the answers they have there."""
    index = SuffixIndex(shortest, longest)
    index.extend(tokens)
    assert index.continuation(tokens, most) == expected


class Counting(dict[Any, int]):
    """A dict that counts how often it is written and read."""

    writes = 0
    reads = 0

    def setdefault(self, *arguments: Any) -> int:
        """Count a write."""
        self.writes += 1
        return super().setdefault(*arguments)

    def get(self, *arguments: Any) -> Any:
        """Count a read."""
        self.reads += 1
        return super().get(*arguments)


class Watched(list[int]):
    """A list that remembers the lowest index it was read at."""

    lowest = 10**9

    def __getitem__(self, place: Any) -> Any:
        """Note the place."""
        start = place.start if isinstance(place, slice) else place
        self.lowest = min(self.lowest, start if start >= 0 else len(self) + start)
        return super().__getitem__(place)


def test_a_token_costs_the_same_however_long_the_text() -> None:
    """One more token writes one entry per n-gram length, reads the text's end only, and so does a look-up."""
    costs = set()
    for length in (50, 500, 5000):
        index = SuffixIndex(2, 4)
        index.first_end = counting = Counting()
        index.extend(list(range(length)))
        tokens = Watched([*range(length), 7])
        counting.writes = 0
        index.extend(tokens)
        index.extend(tokens)  # nothing new: no work
        index.continuation(tokens, 3)
        costs.add((counting.writes, counting.reads))
        assert tokens.lowest == length - 4
    assert costs == {(3, 3)}


def test_rows_are_drafted_apart() -> None:
    """Each row drafts from its own text, at most as many tokens as it is allowed, each with q = 1."""
    drafter = NgramDrafter(Options(k=4, min=1, max=3), "cpu")
    texts = [[1, 2, 3, 1], [4, 4], [5], [6, 7, 6]]
    drafter.prefill(0, texts[:2], {})
    drafter.prefill(2, texts[2:], {})
    random = RoundRandom(stream_keys([0] * 4), torch.zeros(4).long(), torch.zeros(4).long())
    sampling = SamplingTensors.of([SamplingParams()] * 4)
    proposal = drafter.propose(
        DraftContext(texts, [2, 3, 3, 0], sampling, random, prompts=[1] * 4, slots=[9] * 4)
    )
    assert list(proposal.offered) == [2, 1, 0, 0]
    assert proposal.tokens.tolist() == [[2, 3], [4, 0], [0, 0], [0, 0]]
    assert proposal.q.prob_of(proposal.tokens)[0].tolist() == [1.0, 1.0]
    drafter.fork(0, [2])
    drafter.release([0])
    assert drafter.indexes[2].continuation([1, 2, 3, 1], 2) == [2, 3]
    assert 0 not in drafter.indexes


@pytest.mark.parametrize("options", [{"k": 0}, {"min": 0}, {"min": 3, "max": 2}])
def test_options_without_a_meaning_are_refused(options: dict[str, int]) -> None:
    """No draft token, an empty suffix or an empty range of lengths is refused."""
    with pytest.raises(ValueError, match=r"expected|at least"):
        Options(**options)
