"""Speculative decoding with a second, smaller model: Leviathan et al. 2211.17192, Chen et al. 2302.01318.

The draft may live on another device; the transfer of its tokens and probabilities counts as draft time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specbench.decoding.padding import padded
from specbench.decoding.verification import RULES, Proposal, RuleName
from specbench.errors import IncompatibleError
from specbench.policies.fixed import Fixed
from specbench.runtime.cache import SlotCache
from specbench.runtime.protocols import DraftContext, DraftMemory, Resources, Strategy
from specbench.runtime.runner import ModelRunner
from specbench.strategies._autoregressive import draft_chain


@dataclass(frozen=True, slots=True)
class Options:
    """Draft `k` tokens with the draft model; the rule that verifies."""

    k: int = 4
    verify: RuleName = "rejection"

    def __post_init__(self) -> None:
        """Refuse a draft of nothing."""
        if self.k < 1:
            raise ValueError(f"k={self.k}; a draft has at least 1 token")


class ModelDrafter:
    """A draft model with its own slot cache, whose rows follow the target's.

    `held[row]` counts the slots that hold committed tokens. What was drafted and rejected lies beyond.
    """

    needs_features: ClassVar[tuple[int, ...]] = ()
    shares_target_cache: ClassVar[bool] = False

    def __init__(self, runner: ModelRunner, *, target: ModelRunner, weights: int) -> None:
        self.runner = runner
        self.runners: Sequence[ModelRunner] = (runner,)
        self.target = target
        self.vocab = int(target.model.get_output_embeddings().weight.shape[0])
        self.readable = int(runner.model.get_input_embeddings().weight.shape[0])
        self.weights = weights
        self.held: dict[int, int] = {}
        self.drafted: Sequence[int] = ()

    def prefill(self, first_row: int, prompts: Sequence[list[int]], features: dict[int, Tensor]) -> None:
        """Fill the draft's cache with the prompts."""
        del features
        counts = [len(prompt) for prompt in prompts]
        # No logits are wanted, but a model must be asked for some: one position.
        self.runner.forward(
            padded([self._readable(prompt) for prompt in prompts], self.runner.device),
            [0] * len(prompts),
            counts,
            first_row=first_row,
            keep=[0] * len(prompts),
        )
        self.held.update({first_row + index: count for index, count in enumerate(counts)})

    def propose(self, context: DraftContext) -> Proposal:
        """Catch up with what was committed, then draft."""
        rows = range(len(context.tokens))
        missing = [self._readable(context.tokens[row][self.held[row] :]) for row in rows]
        starts = [self.held[row] for row in rows]
        for row in rows:
            self.held[row] = len(context.tokens[row])
        self.drafted = context.limits
        return draft_chain(self.runner, context, missing, starts, vocab=self.vocab, home=self.target.device)

    def _readable(self, tokens: list[int]) -> list[int]:
        """Replace ids beyond the draft's vocabulary: whatever it reads there, q is the law it draws from."""
        if self.readable >= self.vocab:
            return tokens
        return [token if token < self.readable else 0 for token in tokens]

    def commit(self, accepted: Sequence[int], features: dict[int, Tensor]) -> None:
        """Keep the slots of accepted tokens; the last drafted token was never run through the draft."""
        del features
        for row, (kept, drafted) in enumerate(
            zip(accepted, self.drafted or [0] * len(accepted), strict=True)
        ):
            self.held[row] += min(kept, max(drafted - 1, 0))
        self.drafted = ()

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Copy a row's slots."""
        self.runner.cache.copy_row(source, list(targets), self.held[source])
        for target in targets:
            self.held[target] = self.held[source]

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        for row in rows:
            self.held.pop(row, None)

    def memory(self) -> DraftMemory:
        """Return the draft's weights and cache."""
        return DraftMemory(self.weights, self.runner.cache.bytes_per_token, sum(self.held.values()))


def build(options: Options, name: str, resources: Resources) -> Strategy:
    """Build the strategy; raises IncompatibleError if no draft model was given."""
    if resources.draft_model is None:
        raise IncompatibleError(
            f"strategy '{name}' needs a draft model", hint="name one with --draft MODEL, or leave it out"
        )
    rule = RULES[options.verify]()
    runner = ModelRunner(resources.draft_model, SlotCache(resources.rows, resources.width))
    drafter = ModelDrafter(runner, target=resources.target, weights=resources.draft_weights)
    return Strategy(name, drafter, rule, Fixed(options.k), lossless=rule.lossless)
