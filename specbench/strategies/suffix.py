"""Suffix drafting: propose what most often followed the suffixes of the text, longer after longer matches.

SuffixDecoding, Oliaro et al. 2411.04975. A suffix automaton of a request's prompt and output counts what
came after each substring. For every suffix of up to `max` tokens that occurred before, a draft is grown
greedily by estimated chance (the product of the relative frequencies along its path), down to `min_prob`,
with at most `factor` times as many tokens as were matched (their alpha and MAX_SPEC). The one with the
highest sum of chances, the expected number of accepted tokens if frequencies were chances, is proposed.
Trees hold several continuations per node (`nodes`), chains (the default) only the most frequent.

With `corpus=yes` the outputs that the same run has finished are consulted as well, in an automaton of
their own that all rows share and that is never emptied: its memory grows by up to two states per output
token. What is drafted, hence acceptance, then depends on what was served before; outputs do not, since
exact match is required. A rule with coins would not do: where a request comes again under the same seed,
the draft is made of what those very coins decided, and a draft that depends on its coin is not kept with
probability p. (Say p is .5, .3, .2 and the first time token 0 was drafted. It is emitted if the coin is
below .5, else 1 or 2 is. The second time that token is the draft, but a coin of .5 or more rejects it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specbench.decoding.verification import RULES, Proposal, RuleName
from specbench.policies import length_policy
from specbench.registry import PolicySpec
from specbench.runtime.protocols import DraftContext, DraftMemory, Resources, Strategy
from specbench.runtime.runner import ModelRunner
from specbench.strategies._suffix_automaton import Draft, SuffixAutomaton

ROUNDING = 1e-6
"""So that 0.7 times 10 matched tokens allows 7."""


@dataclass(frozen=True, slots=True)
class Options:
    """At most `k` tokens deep and `factor` per matched token; trees of up to `nodes` (0: a chain).

    Suffixes of up to `max` tokens; no node below `min_prob`; `corpus`: also earlier outputs of the run, which
    needs `verify=exact`.
    """

    k: int = 8
    nodes: int = 0
    factor: float = 1.0
    min_prob: float = 0.1
    max: int = 16
    corpus: bool = False
    verify: RuleName = "rejection"
    policy: PolicySpec = "fixed"

    def __post_init__(self) -> None:
        """Refuse values that draft nothing."""
        if self.k < 1:
            raise ValueError(f"k={self.k}; a draft has at least 1 token")
        if self.nodes < 0:
            raise ValueError(f"nodes={self.nodes}; expected 0 (a chain) or more")
        if not 0 < self.factor < float("inf"):
            raise ValueError(f"factor={self.factor}; expected a number above 0")
        if not 0 <= self.min_prob <= 1:
            raise ValueError(f"min_prob={self.min_prob}; expected 0 to 1")
        if self.max < 1:
            raise ValueError(f"max={self.max}; expected at least 1")
        if self.nodes and not RULES[self.verify].judges_trees:
            raise ValueError(f"verify={self.verify} judges chains; for a tree use rejection or exact")
        if self.corpus and self.verify != "exact":
            raise ValueError(
                f"corpus=yes with verify={self.verify}; expected verify=exact, since drafts from earlier "
                "outputs are not independent of the coins of a request that is served again"
            )


class Text:
    """What a row has read, indexed. Rows that were forked share one until one of them grows.

    `tokens` is the row's own list, which the loop extends: at the end it holds the whole output.
    """

    def __init__(self, automaton: SuffixAutomaton, prompt: int, indexed: int) -> None:
        self.automaton = automaton
        self.prompt = prompt
        self.indexed = indexed
        self.tokens: Sequence[int] = ()
        self.holders = 1

    def copy(self) -> Text:
        """Return an independent text of one holder."""
        return Text(self.automaton.copy(), self.prompt, self.indexed)

    def follow(self, tokens: Sequence[int]) -> None:
        """Index what is new."""
        self.automaton.extend(tokens[self.indexed :])
        self.indexed = len(tokens)
        self.tokens = tokens


class SuffixDrafter:
    """One counted suffix automaton per row, and one of finished outputs; q is the point mass on each node."""

    needs_features: ClassVar[tuple[int, ...]] = ()
    shares_target_cache: ClassVar[bool] = False
    runners: Sequence[ModelRunner] = ()

    def __init__(self, options: Options, device: torch.device | str) -> None:
        self.options = options
        self.device = device
        self.texts: dict[int, Text] = {}
        self.corpus = self._automaton() if options.corpus else None

    def _automaton(self) -> SuffixAutomaton:
        return SuffixAutomaton(self.options.max + self.options.k)

    def prefill(self, first_row: int, prompts: Sequence[list[int]], features: dict[int, Tensor]) -> None:
        """Index the prompts."""
        del features
        for offset, prompt in enumerate(prompts):
            text = Text(self._automaton(), len(prompt), 0)
            text.follow(prompt)
            self.texts[first_row + offset] = text

    def propose(self, context: DraftContext) -> Proposal:
        """Draft each row from what followed its suffixes."""
        drafts = []
        for row, tokens in enumerate(context.tokens):
            self._own(row, len(tokens)).follow(tokens)
            drafts.append(self._draft(row, tokens, context.limits[row], context.slots[row]))
        tokens_of = [draft.tokens for draft in drafts]
        if self.options.nodes:
            return Proposal.certain_trees(tokens_of, [draft.parents for draft in drafts], self.device)
        return Proposal.certain(tokens_of, self.device)

    def _own(self, row: int, length: int) -> Text:
        """Return a row's text; one that is shared is copied before it grows."""
        text = self.texts[row]
        if text.holders > 1 and length > text.indexed:
            text.holders -= 1
            text = self.texts[row] = text.copy()
        return text

    def _draft(self, row: int, tokens: Sequence[int], depth: int, slots: int) -> Draft:
        """Return the best draft over all matched suffixes; of equal ones the longest match, the own text."""
        options = self.options
        depth = min(depth, options.k)
        room = min(options.nodes or depth, slots)
        best = Draft([], [], 0.0)
        if not depth:
            return best
        own = self.texts[row].automaton
        for automaton in (own,) if self.corpus is None else (own, self.corpus):
            for length, state in automaton.matches(tokens[-options.max :]):
                allowed = min(room, int(options.factor * length + ROUNDING))
                if allowed <= best.score:  # no chance exceeds 1, and shorter matches allow no more
                    break
                draft = automaton.draft(
                    state,
                    room=allowed,
                    depth=depth,
                    min_prob=options.min_prob,
                    is_chain=not options.nodes,
                )
                if draft.score > best.score:
                    best = draft
        return best

    def commit(self, accepted: Sequence[int], features: dict[int, Tensor]) -> None:
        """Nothing to do: the index follows the committed tokens."""

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Let rows share a text; the first to grow copies it. A row that is overwritten has finished."""
        text = self.texts[source]
        for target in targets:
            self._drop(target)
            self.texts[target] = text
            text.holders += 1

    def release(self, rows: Sequence[int]) -> None:
        """Drop rows."""
        for row in rows:
            self._drop(row)

    def _drop(self, row: int) -> None:
        """Drop a row; the output of a text that nobody holds any more joins the corpus."""
        text = self.texts.pop(row, None)
        if text is None:
            return
        text.holders -= 1
        if self.corpus is not None and not text.holders:
            self.corpus.restart()
            self.corpus.extend(text.tokens[text.prompt :])

    def memory(self) -> DraftMemory:
        """No weights, no KV."""
        return DraftMemory()


def build(options: Options, name: str, resources: Resources) -> Strategy:
    """Build the strategy."""
    rule = RULES[options.verify]()
    drafter = SuffixDrafter(options, resources.target.device)
    return Strategy(
        name,
        drafter,
        rule,
        length_policy(options.policy, options.k),
        lossless=rule.lossless,
        max_nodes=options.nodes,
    )
