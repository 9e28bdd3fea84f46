"""What faults of the step loop share: a memory of the last round, and laws from other parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution
from specbench.decoding.processing import SamplingTensors, process
from specbench.records import RoundRecord
from specbench.runtime.loop import Row, StepLoop, Window
from specbench.runtime.protocols import Strategy


def plant(strategy: Strategy, loop: type[StepLoop]) -> Strategy:
    """Decode with a broken loop; a strategy that does not draft stays as it is."""
    return strategy if strategy.drafter is None else replace(strategy, loop=loop)


class RemembersLastRound(StepLoop):
    """A loop that knows how the last round of each request went."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.last: dict[int, RoundRecord] = {}

    def last_of(self, row: Row) -> RoundRecord:
        """Return the last round of a row, its prefill if there was no other."""
        return self.last[row.request.id]

    def describe_round(self, row: Row, *rest: Any) -> RoundRecord:
        """Keep the record."""
        record = super().describe_round(row, *rest)
        self.last[row.request.id] = record
        return record


def offered_to(window: Window) -> Tensor:
    """Return the rows that judge an offered token, `[B, N + 1]`; the others only give bonus tokens."""
    proposal = window.proposal
    batch, num = proposal.tokens.shape
    index = torch.arange(num, device=proposal.tokens.device)
    parents = proposal.parents if proposal.parents is not None else (index - 1).expand(batch, -1)
    offered = (index < proposal.counts[:, None]).to(torch.int64)
    judged = torch.zeros(batch, num + 1, dtype=torch.int64, device=offered.device)
    return judged.scatter_add_(1, parents + 1, offered) > 0


def with_draft(window: Window) -> Tensor:
    """Return all rows of the requests that were offered something, `[B, N + 1]`."""
    return (window.proposal.counts > 0)[:, None].expand(-1, window.proposal.num + 1)


class WrongParameters(StepLoop):
    """Some rows of a window with drafts are processed with other parameters than were asked for."""

    parameter: ClassVar[str]
    """A name of `SamplingTensors.uses`."""

    def rows_of(self, window: Window) -> Tensor:
        """Return which rows are processed wrongly, `[B, N + 1]`."""
        return with_draft(window)

    def wrong(self, sampling: SamplingTensors) -> SamplingTensors:
        """Return the parameters for those rows: by default without the one in question."""
        return replace(sampling, uses=sampling.uses - {self.parameter})

    def law(self, window: Window) -> Distribution:
        """Return laws of which some are wrong."""
        right = super().law(window)
        if window.proposal.num == 0 or self.parameter not in self.sampling.uses:
            return right
        history = self.history(window, self.sampling)
        wrong = process(window.logits, self.wrong(self.sampling), history, window.allowed)
        rows = self.rows_of(window)
        if wrong.probs is not None and right.probs is not None:
            return Distribution.dense(torch.where(rows[..., None], wrong.probs, right.probs))
        assert wrong.tokens is not None
        assert right.tokens is not None
        return Distribution.point(torch.where(rows, wrong.tokens, right.tokens))


class OnBonusOnly(WrongParameters):
    """The parameter reaches the row of the bonus token, as in ordinary decoding, and no row of a draft."""

    def rows_of(self, window: Window) -> Tensor:
        """Return the rows that judge drafts."""
        return offered_to(window)


class OnDraftOnly(WrongParameters):
    """The parameter shapes what is drafted, and no row of the verification."""


_TWICE: dict[str, Callable[[SamplingTensors], SamplingTensors]] = {
    "temperature": lambda s: replace(s, order=("temperature", *s.order)),
    "top_p": lambda s: replace(s, order=(*s.order, "top_p")),
    "repetition": lambda s: replace(s, repetition=s.repetition**2),
    "presence": lambda s: replace(s, presence=2 * s.presence, frequency=2 * s.frequency),
    "bias": lambda s: replace(s, bias=(s.bias[0], s.bias[1], 2 * s.bias[2])),
}


class CountedTwice(WrongParameters):
    """The parameter is applied by the verification to logits that it was already applied to."""

    def wrong(self, sampling: SamplingTensors) -> SamplingTensors:
        """Return parameters of the same effect as those asked for, twice."""
        return _TWICE[self.parameter](sampling)
