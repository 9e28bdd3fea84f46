"""What reaches the output: end-of-sequence, stop tokens and the budget, applied in one place.

A draft token that was rejected never gets here, so a rejected EOS cannot stop a request; an EOS inside
the accepted run cuts off what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbench.records import EndedBy

StopChecker = Callable[[Sequence[int]], int | None]
"""Given tokens about to be committed, return how many to keep if a stop string ends there, else None."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What can end one request: `remaining` tokens of budget, EOS ids (empty to ignore), stop ids."""

    remaining: int
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    stop_checker: StopChecker | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """The tokens that reach the output, and what ended the request, if anything."""

    tokens: list[int]
    ended_by: EndedBy


def commit(accepted: Sequence[int], next_token: int, limits: Limits) -> Committed:
    """Truncate an accepted run and its extra token at the first thing that ends the request.

    An EOS or stop token is kept and is the last token; on the very last token of the budget it still
    counts as EOS. With nothing remaining, nothing is committed.
    """
    kept: list[int] = []
    for token in (*accepted, next_token):
        if len(kept) == limits.remaining:
            break
        kept.append(token)
        if token in limits.eos_ids:
            return _after_stop_strings(kept, limits, "eos")
        if token in limits.stop_ids:
            return _after_stop_strings(kept, limits, "stop")
    ended: EndedBy = "budget" if len(kept) == limits.remaining else "none"
    return _after_stop_strings(kept, limits, ended)


def _after_stop_strings(kept: list[int], limits: Limits, ended: EndedBy) -> Committed:
    """A stop string may end the request earlier than an id does."""
    if limits.stop_checker is not None:
        length = limits.stop_checker(kept)
        if length is not None:
            return Committed(kept[:length], "stop")
    return Committed(kept, ended)
