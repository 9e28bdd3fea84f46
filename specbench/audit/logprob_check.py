"""Reported log-probabilities against the reference's: of the tokens themselves, and of the likeliest ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from specbench.records import TokenLogprobs

TOLERANCE = 0.01
"""In nats; two forwards differ by some 1e-5, and mistakes by whole tenths."""


def mistaken(
    told: Sequence[TokenLogprobs] | None,
    output: Sequence[int],
    raw: Tensor,
    processed: Tensor,
    listed: int,
) -> int:
    """Return how many tokens of an output were given other log-probabilities than the reference's, or none.

    Entries beyond the output count too: they belong to no token that a client got.

    Args:
        told: What the request was told, one entry per token.
        output: The tokens.
        raw: The reference's log-probabilities under the model's own softmax [T, vocab].
        processed: Those under the law that was sampled [T, vocab]; -inf where it has no mass.
        listed: How many of the likeliest tokens were asked for.
    """
    entries = told or ()
    wrong = max(0, len(entries) - len(output)) + max(0, len(output) - len(entries))
    for place, (entry, token) in enumerate(zip(entries, output, strict=False)):
        wrong += not (
            _is_near(entry.raw, float(raw[place, token]))
            and _is_near(entry.processed, float(processed[place, token]))
            and _agrees(entry.top_raw, raw[place], listed)
            and _agrees(entry.top_processed, processed[place], listed)
        )
    return wrong


def _agrees(top: Sequence[tuple[int, float]], law: Tensor, listed: int) -> bool:
    """Whether a list holds the likeliest tokens, best first, each with its own log-probability."""
    best = [value for value in law.topk(min(listed, len(law))).values.tolist() if value > -math.inf]
    return (
        len(top) == len(best)
        and len({token for token, _ in top}) == len(top)
        and all(_is_near(said, value) for (_, said), value in zip(top, best, strict=True))
        and all(_is_near(said, float(law[token])) for token, said in top)
    )


def _is_near(said: float, value: float) -> bool:
    return said == value or abs(said - value) <= TOLERANCE
