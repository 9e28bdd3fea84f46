"""What reaches the output, and what ends a request."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from specbench.decoding.commit import Committed, Limits, commit
from specbench.decoding.distribution import Distribution
from specbench.decoding.random_numbers import RoundRandom, stream_keys
from specbench.decoding.verification import RULES, Proposal, Rule

EOS = 9
STOP = 8


def limits(remaining: int = 100) -> Limits:
    return Limits(remaining, frozenset({EOS}), frozenset({STOP}))


def test_all_tokens_of_an_ordinary_round_are_kept() -> None:
    """Without anything to end it, a round gives its accepted run and its extra token."""
    assert commit([1, 2], 3, limits()) == Committed([1, 2, 3], "none")
    assert commit([], 3, limits()) == Committed([3], "none")


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rejected_end_of_sequence_does_not_stop_a_request(rule: type[Rule]) -> None:
    """An EOS that was drafted but rejected never reaches the output, nor does it end anything."""
    p = Distribution.point(torch.tensor([[1, 2, 3]]))
    random = RoundRandom(stream_keys([0]), torch.tensor([0]), torch.tensor([0]))
    drafted = [1, EOS]
    outcome = rule().verify(p, Proposal.certain([drafted]), random)
    accepted = drafted[: int(outcome.accepted)]
    assert commit(accepted, int(outcome.next_token), limits()) == Committed([1, 2], "none")


def test_an_accepted_end_of_sequence_cuts_off_what_follows() -> None:
    """An EOS inside the accepted run is kept and is the last token."""
    assert commit([1, EOS, 2], 3, limits()) == Committed([1, EOS], "eos")
    assert commit([EOS, EOS], EOS, limits()) == Committed([EOS], "eos")


def test_the_extra_token_can_be_the_end_of_sequence() -> None:
    """An EOS that comes as the recovered or bonus token ends the request."""
    assert commit([1, 2], EOS, limits()) == Committed([1, 2, EOS], "eos")
    assert commit([], EOS, limits()) == Committed([EOS], "eos")


def test_a_stop_token_ends_a_request_and_is_named() -> None:
    """A stop id is kept, is the last token, and counts as a stop."""
    assert commit([1, STOP, 2], 3, limits()) == Committed([1, STOP], "stop")
    assert commit([1], STOP, limits()) == Committed([1, STOP], "stop")


def test_whichever_comes_first_ends_the_request() -> None:
    """Of EOS, stop id and budget the first one counts."""
    assert commit([STOP, EOS], 1, limits()).ended_by == "stop"
    assert commit([EOS, STOP], 1, limits()).ended_by == "eos"
    assert commit([1, EOS], 2, limits(1)) == Committed([1], "budget")


def test_an_id_that_is_both_counts_as_end_of_sequence() -> None:
    """A stop id that is an EOS too ends the request as EOS."""
    assert commit([1], EOS, Limits(5, frozenset({EOS}), frozenset({EOS}))).ended_by == "eos"


@pytest.mark.parametrize("token", [EOS, STOP])
def test_an_end_on_the_last_token_of_the_budget_is_not_a_cut(token: int) -> None:
    """On the very last token of the budget an EOS still counts as EOS, and a stop id as a stop."""
    ended = "eos" if token == EOS else "stop"
    assert commit([1, token, 2], 3, limits(2)) == Committed([1, token], ended)
    assert commit([1, 2], token, limits(3)) == Committed([1, 2, token], ended)


@pytest.mark.parametrize(
    ("budget", "kept", "ended_by"),
    [
        (0, [], "budget"),
        (1, [1], "budget"),
        (3, [1, 2, 3], "budget"),
        (4, [1, 2, 3, 4], "budget"),
        (5, [1, 2, 3, 4], "none"),
    ],
    ids=["0", "1", "k", "k + 1", "k + 2"],
)
def test_the_budget_cuts_a_round_of_three_drafts(budget: int, kept: list[int], ended_by: str) -> None:
    """With k = 3 drafts accepted, what goes beyond the budget is dropped, and the request ends there."""
    result = commit([1, 2, 3], 4, limits(budget))
    assert (result.tokens, result.ended_by) == (kept, ended_by)


def test_without_ids_nothing_but_the_budget_ends_a_request() -> None:
    """Ignoring EOS is an empty set of EOS ids: the token is then like any other."""
    assert commit([1, EOS, STOP], 2, Limits(9)) == Committed([1, EOS, STOP, 2], "none")


class StopAfter:
    """A stop string that ends with a given token, and a memory of what was asked."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.asked: list[list[int]] = []

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """Keep the tokens up to the one that completes the string."""
        self.asked.append(list(tokens))
        return tokens.index(self.last) + 1 if self.last in tokens else None


def test_a_stop_string_cuts_where_it_ends() -> None:
    """The checker says how many tokens to keep; the request then ends with a stop."""
    assert commit([1, 2, 3], 4, Limits(9, stop_checker=StopAfter(2))) == Committed([1, 2], "stop")
    assert commit([1, 2, 3], 4, Limits(9, stop_checker=StopAfter(7))) == Committed([1, 2, 3, 4], "none")


def test_a_stop_string_before_an_end_of_sequence_wins() -> None:
    """A stop string that ends earlier in the round than an EOS, or than the budget, counts as the stop."""
    early = Limits(9, frozenset({EOS}), stop_checker=StopAfter(1))
    assert commit([1, EOS], 2, early) == Committed([1], "stop")
    assert commit([1, 2], 3, Limits(2, stop_checker=StopAfter(1))) == Committed([1], "stop")


def test_a_stop_string_is_not_looked_for_beyond_the_end() -> None:
    """The checker sees only what would be committed: nothing after an EOS or beyond the budget."""
    checker = StopAfter(2)
    assert commit([1, EOS, 2], 2, Limits(9, frozenset({EOS}), stop_checker=checker)).ended_by == "eos"
    assert commit([1, 3, 2], 2, Limits(2, stop_checker=checker)).ended_by == "budget"
    assert checker.asked == [[1, EOS], [1, 3]]


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 9), st.integers(0, 8))
def test_what_is_committed_is_a_beginning_of_what_was_decided(
    accepted: list[int], next_token: int, budget: int
) -> None:
    """Committed tokens are a prefix of the round, within the budget, with no ending before its last token."""
    result = commit(accepted, next_token, limits(budget))
    decided = [*accepted, next_token]
    assert result.tokens == decided[: len(result.tokens)]
    assert len(result.tokens) <= budget
    assert not {EOS, STOP}.intersection(result.tokens[:-1])
    if result.ended_by == "none":
        assert result.tokens == decided
        assert len(decided) < budget
    if result.ended_by == "budget":
        assert len(result.tokens) == budget
