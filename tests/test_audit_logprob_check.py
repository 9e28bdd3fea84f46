"""Log-probabilities as told: right ones are believed, wrong values, lists and lengths are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specbench.audit.logprob_check import mistaken
from specbench.records import TokenLogprobs

RAW = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64).log()
LAW = torch.tensor([[0.7, 0.3, 0.0], [0.05, 0.05, 0.9]], dtype=torch.float64).log()
OUTPUT = (1, 2)


def listed(row: torch.Tensor) -> tuple[tuple[int, float], ...]:
    best = row.topk(3)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple((token, value) for token, value in pairs if value > -torch.inf)


TOLD = tuple(
    TokenLogprobs(float(RAW[i, token]), float(LAW[i, token]), listed(RAW[i]), listed(LAW[i]))
    for i, token in enumerate(OUTPUT)
)


def test_what_is_right_is_believed() -> None:
    """The reference's own values pass, also where two of the listed tokens tie and come in another order."""
    assert mistaken(TOLD, OUTPUT, RAW, LAW, 3) == 0
    first, second, third = TOLD[1].top_raw
    swapped = replace(TOLD[1], top_raw=(first, third, second))
    assert mistaken((TOLD[0], swapped), OUTPUT, RAW, LAW, 3) == 0


@pytest.mark.parametrize(
    "told",
    [
        None,
        TOLD[:1],
        (*TOLD, TOLD[0]),
        (replace(TOLD[0], raw=0.0), TOLD[1]),
        (replace(TOLD[0], processed=TOLD[0].raw + 0.5), TOLD[1]),
        (replace(TOLD[0], top_raw=TOLD[1].top_raw), TOLD[1]),
        (replace(TOLD[0], top_processed=TOLD[0].top_raw), TOLD[1]),
        (replace(TOLD[0], top_raw=()), TOLD[1]),
        (replace(TOLD[0], top_raw=(TOLD[0].top_raw[0],) * 3), TOLD[1]),
    ],
)
def test_what_is_wrong_is_counted(told: tuple[TokenLogprobs, ...] | None) -> None:
    """None, too few, too many, and every value that belongs elsewhere."""
    assert mistaken(told, OUTPUT, RAW, LAW, 3) > 0
