"""What faults of the draft share: a drafter around another one, and one that lies about its q."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution
from specbench.decoding.processing import process
from specbench.decoding.verification import Proposal
from specbench.runtime.protocols import DraftContext, Drafter, DraftMemory, Strategy
from specbench.runtime.runner import ModelRunner, Output


class WrappedDrafter:
    """Passes everything on; a fault overrides what it gets wrong."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.needs_features = inner.needs_features
        self.shares_target_cache = inner.shares_target_cache
        self.runners = inner.runners

    def prefill(self, first_row: int, prompts: Sequence[list[int]], features: dict[int, Tensor]) -> None:
        """Take in new prompts."""
        self.inner.prefill(first_row, prompts, features)

    def propose(self, context: DraftContext) -> Proposal:
        """Offer what the inner drafter does."""
        return self.inner.propose(context)

    def commit(self, accepted: Sequence[int], features: dict[int, Tensor]) -> None:
        """Learn what was kept."""
        self.inner.commit(accepted, features)

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Copy a row."""
        self.inner.fork(source, targets)

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        self.inner.release(rows)

    def memory(self) -> DraftMemory:
        """Report the inner drafter's."""
        return self.inner.memory()


def plant(strategy: Strategy, wrapper: Callable[[Drafter], WrappedDrafter]) -> Strategy:
    """Wrap the drafter of a strategy; one that does not draft stays as it is."""
    if strategy.drafter is None:
        return strategy
    # The protocol's class attributes are this object's own, since they are those of whatever it wraps.
    return replace(strategy, drafter=cast(Drafter, wrapper(strategy.drafter)))


def plant_in_chains(strategy: Strategy, wrapper: Callable[[Drafter], WrappedDrafter]) -> Strategy:
    """Wrap the drafter of a strategy that drafts chains."""
    return strategy if strategy.max_nodes else plant(strategy, wrapper)


def plant_in_models(strategy: Strategy, wrapper: Callable[[Drafter], WrappedDrafter]) -> Strategy:
    """Wrap the drafter of a strategy that drafts chains with a model; the q of copied text is no choice."""
    if strategy.drafter is None or not strategy.drafter.runners:
        return strategy
    return plant_in_chains(strategy, wrapper)


def plant_in_own_cache(strategy: Strategy, wrapper: Callable[[Drafter], WrappedDrafter]) -> Strategy:
    """Wrap the drafter of a strategy whose draft model reads text into a cache of its own."""
    drafter = strategy.drafter
    if drafter is None or drafter.shares_target_cache or drafter.needs_features:
        return strategy
    return plant_in_models(strategy, wrapper)


class FalseClaim(WrappedDrafter):
    """Draws from the laws of bent logits, and offers other laws as q. Drafts that are certain stay so."""

    def bend(self, logits: Tensor) -> Tensor:
        """Return the logits to draw from, `[B, 1, V]`."""
        return logits

    def claim(self, logits: Tensor, context: DraftContext, tokens: Tensor) -> Distribution:
        """Return what is offered as q `[B, N]`: by default the law that was asked for.

        `logits` `[B, N, V]` are the draft's own, `tokens` `[B, N]` what was drawn.
        """
        num = tokens.shape[1]
        follows = torch.ones(num, num, dtype=torch.bool, device=tokens.device).tril(-1)
        history = context.history(tokens, follows.expand(len(tokens), -1, -1))
        return process(logits, context.sampling, history)

    def propose(self, context: DraftContext) -> Proposal:
        """Draw a chain, and say that it came from another law."""
        drafter = cast(Any, self.inner)
        seen: list[Tensor] = []
        with ExitStack() as watches:
            for runner in self.runners:
                watches.enter_context(_bent(runner, self.bend, seen))
            proposal = self.inner.propose(context)
        if proposal.q.probs is None or proposal.num == 0:
            return proposal
        logits = torch.cat([drafter.vocabulary.logits(each) for each in seen], 1).to(proposal.tokens.device)
        if (missing := proposal.q.probs.shape[-1] - logits.shape[-1]) > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return replace(proposal, q=self.claim(logits, context, proposal.tokens))


@contextmanager
def _bent(runner: ModelRunner, bend: Callable[[Tensor], Tensor], seen: list[Tensor]) -> Iterator[None]:
    """Let a runner's forwards return bent logits, and keep the straight ones in `seen`."""
    forward = runner.forward

    def bent(*arguments: Any, **named: Any) -> Output:
        output = forward(*arguments, **named)
        seen.append(output.logits)
        return replace(output, logits=bend(output.logits))

    vars(runner)["forward"] = bent  # on the object, where it comes before the method of its class
    try:
        yield
    finally:
        del vars(runner)["forward"]
