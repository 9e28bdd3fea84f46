"""A suffix automaton that counts: every substring of a growing text, how often it occurred, and where last.

Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text", built online; `restart`
begins another text in the same automaton. A state stands for substrings that end at the same places; its
link leads to the longest suffix of them that also ends elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

ROOT = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """Nodes of a tree, parents (-1: the text so far) before children; `score` sums their estimated chances.

    If the estimates were right, the score would be the expected number of accepted tokens.
    """

    tokens: list[int]
    parents: list[int]
    score: float


class SuffixAutomaton:
    """The substrings of up to `longest` tokens with their counts.

    Appending a token takes amortised constant work for the automaton (but for copying the transitions of a
    state that splits) and at most `longest` count updates, one per state that a suffix of the text is in.
    There are at most two states per token. Lists are indexed by state; state 0 is the empty string.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.following: list[dict[int, int]] = [{}]
        """Transitions: the state of a state's strings with one more token."""
        self.link = [-1]
        self.length = [0]
        """Of the longest string of each state."""
        self.count = [0]
        """Occurrences; kept for states that hold a string of at most `longest` tokens."""
        self.last_end = [0]
        """Where the latest occurrence ended, counted over all texts."""
        self.end = 0
        self._whole = ROOT  # the state of the present text
        self._suffix = ROOT  # the state of its last `longest` tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the present text."""
        for token in tokens:
            self._append(token)

    def restart(self) -> None:
        """Begin another text: no substring spans the border."""
        self._whole = self._suffix = ROOT

    def copy(self) -> SuffixAutomaton:
        """Return an independent automaton of the same texts; work in proportion to their length."""
        twin = SuffixAutomaton(self.longest)
        twin.following = [dict(states) for states in self.following]
        twin.link, twin.length = list(self.link), list(self.length)
        twin.count, twin.last_end = list(self.count), list(self.last_end)
        twin.end, twin._whole, twin._suffix = self.end, self._whole, self._suffix
        return twin

    # Building

    def _append(self, token: int) -> None:
        self.end += 1
        state = self._whole
        if token in self.following[state]:  # another text held this one so far, and this token after it
            grown = self._exactly(state, token)
        else:
            grown = self._new_state(self.length[state] + 1, {}, ROOT, 0)
            while state >= 0 and token not in self.following[state]:
                self.following[state][token] = grown
                state = self.link[state]
            if state >= 0:
                self.link[grown] = self._exactly(state, token)
        self._whole = grown
        self._count_suffixes(token)

    def _exactly(self, state: int, token: int) -> int:
        """Return the state whose longest string is that of `state` and `token`; split a longer one."""
        found = self.following[state][token]
        length = self.length[state] + 1
        if self.length[found] == length:
            return found
        shorter = self._new_state(length, dict(self.following[found]), self.link[found], self.count[found])
        self.link[found] = shorter
        while state >= 0 and self.following[state].get(token) == found:
            self.following[state][token] = shorter
            state = self.link[state]
        return shorter

    def _new_state(self, length: int, following: dict[int, int], link: int, count: int) -> int:
        self.length.append(length)
        self.following.append(following)
        self.link.append(link)
        self.count.append(count)
        self.last_end.append(self.end)  # it ends in the token that is being appended
        return len(self.length) - 1

    def _count_suffixes(self, token: int) -> None:
        """Count one more occurrence of every suffix of at most `longest` tokens.

        Walking the links from the whole text instead would take as many steps as a repetitive text is long.
        """
        state = self.following[self._suffix][token]
        if self.length[self.link[state]] >= self.longest:  # its shortest string is one token too long
            state = self.link[state]
        self._suffix = state
        while state != ROOT:
            self.count[state] += 1
            self.last_end[state] = self.end
            state = self.link[state]

    # Asking

    def matches(self, tail: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (length, state) of suffixes of `tail` that occurred with a continuation, longest first.

        One for each state: what followed its shorter suffixes is the same.
        """
        state, length = ROOT, 0
        for token in tail:
            while state != ROOT and token not in self.following[state]:
                state = self.link[state]
                length = self.length[state]
            if token in self.following[state]:
                state = self.following[state][token]
                length += 1
        while state != ROOT:
            if self.following[state]:
                yield length, state
            state = self.link[state]
            length = self.length[state]

    def draft(self, state: int, *, room: int, depth: int, min_prob: float, is_chain: bool) -> Draft:
        """Follow the most frequent continuations of a state's strings: best first.

        A node's estimated chance is the product along its path of how often its token came next, out of
        the occurrences that had a next token. Nodes are added in the order of that estimate; of equal ones
        the nearer to the root, then the latest seen (within one depth no two were last seen at one place).

        Args:
            state: where the text so far ends.
            room: the most nodes.
            depth: the most tokens on a path; with the matched suffix, at most `longest`.
            min_prob: nodes whose estimate is below are left out.
            is_chain: follow only the most frequent continuation of each node, the latest of equals.
        """
        tokens: list[int] = []
        parents: list[int] = []
        total = 0.0
        waiting: list[tuple[float, int, int, int, int, int]] = []
        parent, level, chance = -1, 0, 1.0
        while len(tokens) < room:
            if level < depth and self.following[state]:
                for token, child, estimate in self._continuations(state, chance, is_chain):
                    if estimate >= min_prob:
                        entry = (-estimate, level + 1, -self.last_end[child], token, child, parent)
                        heappush(waiting, entry)
            if not waiting:
                break
            negative, level, _, token, state, above = heappop(waiting)
            parent, chance = len(tokens), -negative
            tokens.append(token)
            parents.append(above)
            total += chance
        return Draft(tokens, parents, total)

    def _continuations(self, state: int, chance: float, only_best: bool) -> list[tuple[int, int, float]]:
        """Return (token, state, estimate) of what came next; counting all takes a look at each of them."""
        following = list(self.following[state].items())
        occurrences = sum(self.count[child] for _, child in following)
        if only_best:
            following = [max(following, key=lambda pair: (self.count[pair[1]], self.last_end[pair[1]]))]
        return [(token, child, chance * (self.count[child] / occurrences)) for token, child in following]
