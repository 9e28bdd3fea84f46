"""What the step loop calls: drafters, length policies, and a strategy made of both and a rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from specbench.decoding.processing import History, SamplingTensors
from specbench.decoding.random_numbers import RoundRandom
from specbench.decoding.verification import Proposal, Rule
from specbench.runtime.grammar import DraftConstraint, Matcher
from specbench.runtime.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may look at when it proposes, for cache rows 0 to B - 1.

    `tokens[b]` is the prompt (its first `prompts[b]` tokens) and output of row b so far, read only;
    `limits[b]` the longest run it may
    draft (the depth of a tree), 0 for none: budget and context are already accounted for. `slots[b]` is how
    many nodes there is room for. `stop_below`: after a drafted token whose own probability under the law it
    was drawn from (where that is certain at temperature 0, under the draft's softmax) is below this, a row
    drafts no more; the token is kept (dropping it would bias).
    """

    tokens: Sequence[list[int]]
    limits: Sequence[int]
    sampling: SamplingTensors
    random: RoundRandom
    prompts: Sequence[int]
    slots: Sequence[int]
    stop_below: float = 0.0
    matchers: Sequence[Matcher | None] | None = None

    def history(self, nodes: Tensor, ancestors: Tensor) -> History | None:
        """Return what rows that follow some of `nodes` `[B, N]` follow; see `processing.History`.

        None where no request's distribution depends on it.
        """
        if not self.sampling.needs_history:
            return None
        return History(self.tokens, self.prompts, nodes, ancestors)

    def constraint(self) -> DraftConstraint | None:
        """Return what keeps drafts within the grammars of the rows; None without any."""
        compilers = [matcher.compiler for matcher in self.matchers or () if matcher is not None]
        return DraftConstraint(compilers[0], self.matchers or ()) if compilers else None


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """What a drafter holds: bytes of weights and of KV per token (0: shared with the target), slots used."""

    weights: int = 0
    kv_per_token: int = 0
    slots: int = 0


class Drafter(Protocol):
    """Proposes tokens. Rows are cache rows, the same as the target's, dense from 0."""

    needs_features: ClassVar[tuple[int, ...]]
    shares_target_cache: ClassVar[bool]
    runners: Sequence[ModelRunner]
    """The model runners it drives, so that their forwards are timed; empty for model-free drafters."""

    def prefill(self, first_row: int, prompts: Sequence[list[int]], features: dict[int, Tensor]) -> None:
        """Take in the prompts of new rows `first_row` onward."""
        ...

    def propose(self, context: DraftContext) -> Proposal:
        """Offer up to `limits[b]` tokens for each row; fewer, or none, is fine."""
        ...

    def commit(self, accepted: Sequence[int], features: dict[int, Tensor]) -> None:
        """Learn how many draft tokens of each row were kept. `DraftContext.tokens` then grow.

        After full acceptance a draft model's cache lacks the last drafted token: catching up is ragged.
        """
        ...

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Make rows `targets` continue as copies of row `source`."""
        ...

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        ...

    def memory(self) -> DraftMemory:
        """Say what is held now."""
        ...


@dataclass(frozen=True, slots=True)
class BatchView:
    """What a length policy sees before a step; one entry per row."""

    contexts: Sequence[int]
    remaining: Sequence[int]
    free_slots: int


@dataclass(frozen=True, slots=True)
class StepView:
    """What a length policy sees after a step; one entry per row."""

    drafted: Sequence[int]
    accepted: Sequence[int]


class LengthPolicy(Protocol):
    """Chooses how many tokens to draft, from what was known before the draw.

    Past acceptances and batch sizes may decide, never a token about to be drafted. `max_length` is the most
    it ever chooses; `stop_below` becomes `DraftContext.stop_below`. `lively_batch` is a batch size at which
    it drafts up to `max_length` (None: at any), for those who want to see such drafts.
    """

    max_length: int
    stop_below: float
    lively_batch: int | None

    def reset(self) -> None:
        """Forget everything: a schedule begins, and must not depend on the ones before it."""
        ...

    def choose(self, view: BatchView) -> list[int]:
        """Return the draft length of each row."""
        ...

    def observe(self, step: StepView) -> None:
        """Learn from a step."""
        ...


@dataclass(frozen=True, slots=True)
class Strategy:
    """A drafter (None: ordinary decoding), a verification rule, a length policy, and a claim.

    `max_nodes` is the most tokens in one proposal where that exceeds its length: trees. `loop` is the class
    of the step loop where it is not the usual one: injected faults.
    """

    name: str
    drafter: Drafter | None
    rule: Rule
    policy: LengthPolicy
    lossless: bool
    max_nodes: int = 0
    loop: Any | None = None

    @property
    def max_draft(self) -> int:
        """Return the longest draft this strategy may offer."""
        return self.policy.max_length if self.drafter is not None else 0

    @property
    def lookahead(self) -> int:
        """Return the most slots one step needs beyond the committed tokens."""
        return max(self.max_draft, self.max_nodes if self.drafter is not None else 0)


@dataclass(frozen=True, slots=True)
class Resources:
    """What a strategy is built from.

    `target` runs the model under test; `draft_model` is a second HF model (None where none was given)
    of `draft_weights` bytes, whose ids are the target's unless `draft_ids` maps them. `rows` and `width`
    size a drafter's cache.
    """

    target: ModelRunner
    draft_model: Any | None
    draft_weights: int
    rows: int
    width: int
    draft_ids: Sequence[int] | None = None


class BuildStrategy(Protocol):
    """What a strategy's module exports as `build`."""

    def __call__(self, options: Any, name: str, resources: Resources) -> Strategy:
        """Build the strategy named `name`."""
        ...
