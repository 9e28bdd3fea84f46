"""Suffix drafting: counts against a search, drafts against a second implementation, and what rows share."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONTEXT, collect, copied, requests, shared

from specbench.decoding.processing import SamplingTensors
from specbench.decoding.random_numbers import RoundRandom, stream_keys
from specbench.decoding.verification import Proposal
from specbench.engines.local import LocalEngine
from specbench.records import SamplingParams, Schedule
from specbench.runtime.protocols import DraftContext
from specbench.strategies._suffix_automaton import ROOT, SuffixAutomaton
from specbench.strategies.suffix import Options, SuffixDrafter

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=4)
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=32)


def state_of(automaton: SuffixAutomaton, string: Sequence[int]) -> int | None:
    """Return the state of a string, or None if it never occurred."""
    state = ROOT
    for token in string:
        if token not in automaton.following[state]:
            return None
        state = automaton.following[state][token]
    return state


def by_search(texts: Sequence[Sequence[int]], longest: int) -> tuple[Counter[Any], dict[Any, int]]:
    """Return how often each substring of up to `longest` tokens occurred, and where it last ended."""
    counts: Counter[Any] = Counter()
    ends: dict[Any, int] = {}
    before = 0
    for text in texts:
        for end in range(1, len(text) + 1):
            for start in range(max(0, end - longest), end):
                counts[tuple(text[start:end])] += 1
                ends[tuple(text[start:end])] = before + end
        before += len(text)
    return counts, ends


@given(TEXTS, st.integers(1, 6))
def test_counts_are_those_of_a_search(texts: list[list[int]], longest: int) -> None:
    """After every token each substring has the count and last end that comparing everything gives."""
    automaton = SuffixAutomaton(longest)
    for number, text in enumerate(texts):
        automaton.restart()
        for end in range(1, len(text) + 1):
            automaton.extend(text[end - 1 : end])
            counts, ends = by_search([*texts[:number], text[:end]], longest)
            for string in itertools.chain.from_iterable(
                itertools.product(range(3), repeat=length) for length in range(1, min(longest, 3) + 1)
            ):
                assert (state_of(automaton, string) is not None) == (string in counts)
            for string, count in counts.items():
                state = state_of(automaton, string)
                assert state is not None
                assert (automaton.count[state], automaton.last_end[state]) == (count, ends[string])
    assert len(automaton.length) <= 2 * sum(map(len, texts)) + 1


def test_a_long_repetition_costs_a_bounded_number_of_updates() -> None:
    """One token, 20,000 times: no recursion, and each token updates at most `longest` counts."""
    automaton = SuffixAutomaton(10)
    automaton.extend([5] * 20_000)
    state = ROOT
    for length in range(1, 11):
        state = automaton.following[state][5]
        assert automaton.count[state] == 20_000 - length + 1
    assert sum(automaton.count) == sum(20_000 - length + 1 for length in range(1, 11))
    draft = automaton.draft(ROOT, room=10, depth=10, min_prob=0.0, is_chain=True)
    assert draft.tokens == [5] * 10


class Reference:
    """Drafting by plain search: no automaton, no heap, all nodes listed before the best are taken."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def propose(
        self, own: Sequence[int], finished: Sequence[Sequence[int]], depth: int, slots: int
    ) -> tuple[list[int], list[int]]:
        """Return tokens and parents."""
        depth = min(depth, self.options.k)
        room = min(self.options.nodes or depth, slots)
        found: list[tuple[float, int, int, list[int], list[int]]] = []
        for source, texts in enumerate([[own], finished] if self.options.corpus else [[own]]):
            counts, ends = by_search(texts, self.options.max + self.options.k)
            for length in range(min(self.options.max, len(own)), 0, -1):
                match = tuple(own[-length:])
                most = min(room, int(self.options.factor * length + 1e-6))
                tokens, parents, score = self.grow(match, counts, ends, most, depth)
                if tokens:
                    found.append((score, -source, length, tokens, parents))
        if not found:
            return [], []
        *_, tokens, parents = max(found, key=lambda entry: entry[:3])
        return tokens, parents

    def grow(
        self, match: tuple[int, ...], counts: Counter[Any], ends: dict[Any, int], most: int, depth: int
    ) -> tuple[list[int], list[int], float]:
        """List every node that may be offered, best first, and take the first `most`."""
        nodes: list[tuple[float, int, int, tuple[int, ...]]] = []
        level = [((), 1.0)]
        for _ in range(depth if most else 0):
            below: list[tuple[Any, float]] = []
            for path, chance in level:
                following = [(*path, t) for t in range(3) if counts[(*match, *path, t)]]
                total = sum(counts[match + string] for string in following)
                following.sort(key=lambda string: (counts[match + string], ends[match + string]))
                for string in following if self.options.nodes else following[-1:]:
                    estimate = chance * (counts[match + string] / total)
                    if estimate >= self.options.min_prob:
                        below.append((string, estimate))
            nodes += [(-estimate, len(path), -ends[match + path], path) for path, estimate in below]
            level = below
        chosen = sorted(nodes)[:most]
        paths = [path for *_, path in chosen]
        parents = [paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths]
        score = 0.0
        for node in chosen:
            score -= node[0]
        return [path[-1] for path in paths], parents, score


def context_of(
    texts: Sequence[list[int]], limits: Sequence[int], slots: Sequence[int] | None = None
) -> DraftContext:
    """Return the context of a round in which nothing but tokens and room matters."""
    num = len(texts)
    random = RoundRandom(stream_keys([0] * num), torch.zeros(num).long(), torch.zeros(num).long())
    sampling = SamplingTensors.of([SamplingParams()] * num)
    return DraftContext(
        texts, limits, sampling, random, prompts=[len(text) for text in texts], slots=slots or [99] * num
    )


def rows_of(proposal: Proposal) -> list[tuple[list[int], list[int]]]:
    """Return tokens and parents of each row, only what is offered."""
    tokens = proposal.tokens.tolist()
    parents = proposal.parents.tolist() if proposal.parents is not None else None
    return [
        (tokens[row][:num], parents[row][:num] if parents else [*range(-1, num - 1)])
        for row, num in enumerate(proposal.offered)
    ]


OPTIONS = st.builds(
    Options,
    k=st.integers(1, 4),
    nodes=st.sampled_from([0, 0, 1, 3, 8]),
    factor=st.sampled_from([0.5, 1.0, 1.7, 4.0]),
    min_prob=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    max=st.integers(1, 4),
    corpus=st.booleans(),
    verify=st.just("exact"),
)


@settings(max_examples=300)
@given(OPTIONS, st.lists(TEXT, max_size=2), TEXT, st.integers(0, 5), st.integers(0, 9), st.data())
def test_drafts_are_those_of_a_search(
    options: Options, finished: list[list[int]], text: list[int], depth: int, slots: int, data: Any
) -> None:
    """However a text grows, and whatever was finished before, the draft is that of the plain search."""
    drafter = SuffixDrafter(options, "cpu")
    outputs = []
    for output in finished:
        prompt = data.draw(TEXT)
        drafter.prefill(0, [prompt], {})
        live = [*prompt]
        drafter.propose(context_of([live], [1]))
        live += output  # the last tokens of a request are committed after its last proposal
        drafter.release([0])
        outputs.append(output)
    reference = Reference(options)
    end = data.draw(st.integers(1, len(text)))
    drafter.prefill(0, [text[:end]], {})
    while end < len(text):
        end = data.draw(st.integers(end + 1, len(text)))
        proposal = drafter.propose(context_of([text[:end]], [depth], [slots]))
        assert rows_of(proposal) == [reference.propose(text[:end], outputs, depth, slots)]


@given(st.lists(TEXT, min_size=1, max_size=4), st.data())
def test_trees_are_well_formed_and_keep_their_limits(texts: list[list[int]], data: Any) -> None:
    """In a ragged batch parents precede children, siblings differ, depth and room hold, q is 1."""
    options = Options(k=4, nodes=6, factor=5, min_prob=0.0, max=3)
    limits = data.draw(st.lists(st.integers(0, 6), min_size=len(texts), max_size=len(texts)))
    slots = data.draw(st.lists(st.integers(0, 9), min_size=len(texts), max_size=len(texts)))
    drafter = SuffixDrafter(options, "cpu")
    drafter.prefill(0, texts, {})
    proposal = drafter.propose(context_of(texts, limits, slots))
    for row, (tokens, parents) in enumerate(rows_of(proposal)):
        assert len(tokens) <= min(options.nodes, slots[row])
        depths: list[int] = []
        for node, parent in enumerate(parents):
            assert -1 <= parent < node
            depths.append(1 if parent < 0 else depths[parent] + 1)
        assert max(depths, default=0) <= min(limits[row], options.k)
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens)
        alone = SuffixDrafter(options, "cpu")
        alone.prefill(0, [texts[row]], {})
        assert rows_of(alone.propose(context_of([texts[row]], [limits[row]], [slots[row]]))) == [
            (tokens, parents)
        ]
    assert bool((proposal.q.prob_of(proposal.tokens) == 1).all())


@given(TEXT, st.lists(TEXT, min_size=3, max_size=3), st.booleans())
def test_forked_rows_grow_apart(prompt: list[int], grown: list[list[int]], early: bool) -> None:
    """Rows forked from one prefill, before or after it drafted, each draft from their own text alone."""
    options = Options(k=3, max=4)
    drafter = SuffixDrafter(options, "cpu")
    drafter.prefill(0, [prompt], {})
    if early:
        drafter.propose(context_of([prompt], [3]))
    drafter.fork(0, [1, 2])
    texts = [prompt + own for own in grown]
    found = rows_of(drafter.propose(context_of(texts, [3] * 3)))
    again = rows_of(drafter.propose(context_of(texts, [3] * 3)))
    assert found == again == [Reference(options).propose(text, [], 3, 99) for text in texts]
    # The last row moves into a gap, as when a request leaves.
    drafter.fork(2, [0])
    drafter.release([2])
    left = [texts[2] + [1, 1], texts[1] + [0]]
    assert rows_of(drafter.propose(context_of(left, [3] * 2))) == [
        Reference(options).propose(text, [], 3, 99) for text in left
    ]
    drafter.release([0, 1])
    assert not drafter.texts


def test_a_fork_copies_only_when_a_row_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 rows of one prefill make 127 copies once they grow, and moving a row makes none."""
    copies = 0
    copy = SuffixAutomaton.copy

    def counted(automaton: SuffixAutomaton) -> SuffixAutomaton:
        nonlocal copies
        copies += 1
        return copy(automaton)

    monkeypatch.setattr(SuffixAutomaton, "copy", counted)
    drafter = SuffixDrafter(Options(), "cpu")
    drafter.prefill(0, [[1, 2, 3]], {})
    drafter.fork(0, list(range(1, 128)))
    assert copies == 0
    texts = [[1, 2, 3, row] for row in range(128)]
    drafter.propose(context_of(texts, [4] * 128))
    assert copies == 127
    drafter.fork(127, [5])
    drafter.release([127])
    texts[5] = texts.pop()
    drafter.propose(context_of([[*text, 1] for text in texts], [4] * 127))
    assert copies == 127


def test_only_what_has_finished_is_in_the_corpus() -> None:
    """An output counts once its row is released or overwritten, not when the row moves or forks."""
    drafter = SuffixDrafter(Options(k=2, corpus=True, verify="exact"), "cpu")
    assert drafter.corpus is not None
    texts = [[9, 1, 2], [9, 3, 4], [9, 5, 6]]
    drafter.prefill(0, [text[:1] for text in texts], {})
    drafter.propose(context_of(texts, [2] * 3))
    assert drafter.corpus.end == 0
    texts[0] += [7]
    drafter.fork(2, [0])  # row 0 has finished, row 2 moves
    drafter.release([2])
    assert state_of(drafter.corpus, [1, 2, 7]) is not None
    assert drafter.corpus.end == 3
    texts[2] += [8]
    drafter.release([1])
    drafter.release([0])
    for output in ([3, 4], [5, 6, 8]):
        assert state_of(drafter.corpus, output) is not None
    assert state_of(drafter.corpus, [9]) is None  # prompts are not outputs
    assert state_of(drafter.corpus, [7, 3]) is None  # nothing spans two outputs
    # A row that never saw these tokens now drafts from them, and only with the option.
    for corpus, expected in ((True, [2]), (False, [])):
        reader = SuffixDrafter(Options(k=2, corpus=corpus, verify="exact"), "cpu")
        reader.corpus = drafter.corpus if corpus else None
        reader.prefill(0, [[0, 1]], {})
        assert rows_of(reader.propose(context_of([[0, 1]], [2])))[0][0] == expected


@pytest.mark.parametrize(
    ("text", "options", "tokens"),
    [
        ([1, 2, 3, 4, 1, 2, 3], {}, [4, 1, 2]),  # 3 matched: at most 3 proposed
        ([1, 2, 3, 4, 1, 2, 3], {"factor": 2}, [4, 1, 2, 3]),  # to the end of the text
        ([1, 2, 3, 4, 1, 2, 3], {"k": 2}, [4, 1]),
        ([1, 2, 3, 4, 1, 2, 3], {"max": 1}, [4]),
        ([1, 5, 1, 6, 1, 5, 2, 1], {}, [5]),  # more often
        ([1, 5, 1, 6, 1], {}, [6]),  # as often: the latest
        ([1, 5, 1, 6, 1], {"min_prob": 0.6}, []),  # neither is likely enough
        ([1, 2, 3], {}, []),
        ([7], {}, []),
        ([7, 7], {}, [7]),
    ],
)
def test_examples(text: list[int], options: dict[str, Any], tokens: list[int]) -> None:
    """Length follows the match, the most frequent continuation wins, then the latest."""
    drafter = SuffixDrafter(Options(**options), "cpu")
    drafter.prefill(0, [text], {})
    assert rows_of(drafter.propose(context_of([text], [9])))[0][0] == tokens


def test_a_tree_holds_both_continuations() -> None:
    """With nodes, what followed less often is offered as a sibling, behind what is likelier."""
    text = [1, 5, 8, 1, 6, 9, 1, 5, 8, 1]
    drafter = SuffixDrafter(Options(nodes=4, factor=9, max=1, k=2), "cpu")
    drafter.prefill(0, [text], {})
    proposal = drafter.propose(context_of([text], [2]))
    assert rows_of(proposal) == [([5, 8, 6, 9], [-1, 0, -1, 2])]


@pytest.mark.parametrize(
    "options",
    [
        {"k": 0},
        {"nodes": -1},
        {"factor": 0.0},
        {"factor": float("nan")},
        {"min_prob": 1.5},
        {"min_prob": float("nan")},
        {"max": 0},
        {"corpus": True},
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any]) -> None:
    """Nothing to draft, nothing to match, no probability, or a corpus under a rule with coins is refused."""
    with pytest.raises(ValueError, match=r"expected|at least"):
        Options(**options)


def test_a_corpus_changes_the_number_of_steps_but_not_the_outputs() -> None:
    """With corpus=yes a ragged batch, served twice, emits what ordinary decoding does; sooner in the end."""
    engine = LocalEngine(copied(shared("llama"), "sdpa"), eos_ids=(), rows=4, width=CONTEXT)
    prompts = [(3, 1, 4), (1,), (5, 9, 2, 6, 5), (3, 5), (8, 9, 7), (16, 0)]
    for temperature in (0.0, 1.0):
        offered = requests(prompts, temperature=temperature, max_new_tokens=20)
        engine.open("ordinary")
        ordinary = collect(engine.serve(Schedule(offered, concurrency=4)))
        engine.close()  # forget what was built
        engine.open("suffix:k=4,corpus=yes,verify=exact")
        first, second = (collect(engine.serve(Schedule(offered, concurrency=4))) for _ in range(2))
        assert first.outputs == second.outputs == ordinary.outputs
        assert len(second.rounds) < 0.75 * len(first.rounds)


def test_a_tree_without_nodes_is_an_ordinary_step() -> None:
    """Where no row has anything to offer, a strategy of trees decodes one token like any other."""
    engine = LocalEngine(copied(shared("llama"), "sdpa"), eos_ids=(), rows=2, width=CONTEXT)
    offered = requests([(3,), (8, 1)], temperature=0.0, max_new_tokens=20)
    served = {}
    for spec in ("ordinary", "suffix:k=4,nodes=8"):
        engine.open(spec)
        served[spec] = collect(engine.serve(Schedule(offered, concurrency=2)))
    assert served["suffix:k=4,nodes=8"].outputs == served["ordinary"].outputs
    drafted = [entry.drafted for entry in served["suffix:k=4,nodes=8"].rounds if entry.round]
    assert drafted[0] == 0 < max(drafted)


@pytest.mark.parametrize("spec", ["suffix:k=3", "suffix:k=3,nodes=6"])
def test_a_text_without_repetition_drafts_nothing(spec: str) -> None:
    """Where no row has anything to offer, as a chain or as a tree, a step is one of ordinary decoding."""
    engine = LocalEngine(copied(shared("llama"), "sdpa"), eos_ids=(), rows=2, width=CONTEXT)
    offered = requests([(1,), (1, 2, 3, 4, 5, 6, 7)], temperature=1.0, max_new_tokens=6)
    served = []
    for strategy in ("ordinary", f"{spec},verify=exact"):
        engine.open(strategy)
        served.append(collect(engine.serve(Schedule(offered, concurrency=1))))
    assert served[0].outputs == served[1].outputs
    assert 0 in {entry.drafted for entry in served[1].rounds if entry.round}
