"""Random tables for property tests, and numbers by purpose in place of random ones."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from torch import Tensor

from specbench.decoding.random_numbers import Purpose


@dataclass(frozen=True)
class Scripted:
    """Uniforms by purpose, `[B, num]`, in place of a `RoundRandom`."""

    numbers: dict[Purpose, Tensor]

    def uniform(self, purpose: Purpose, num: int, *, by_round: bool = True) -> Tensor:
        """Return the numbers of that purpose."""
        numbers = self.numbers[purpose]
        assert numbers.shape[1] == num
        return numbers


def table(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# Random tables. Integer weights, so that equal probabilities are equal to the last bit.


@st.composite
def laws(draw: st.DrawFn, vocab: int, support: list[int]) -> list[float]:
    """Draw a law on a part of the vocabulary: uneven, with zeros, or a point mass."""
    weights = [0] * vocab
    if draw(st.booleans()):
        for token in support:
            weights[token] = draw(st.integers(0, 9))
    if sum(weights) == 0:
        weights[draw(st.sampled_from(support))] = 1
    return [weight / sum(weights) for weight in weights]


@st.composite
def tables(draw: st.DrawFn, most: int = 5) -> tuple[Tensor, Tensor, int]:
    """Draw (p, q, k): two tables `[V, V, V]` in which row (a, b) follows a context that ends in a, b."""
    vocab = draw(st.integers(2, most))
    k = draw(st.integers(0, 3))
    everything = list(range(vocab))

    def pair() -> tuple[list[float], list[float]]:
        kind = draw(st.sampled_from(["any", "equal", "disjoint"]))
        if kind == "disjoint":
            cut = draw(st.integers(1, vocab - 1))
            order = draw(st.permutations(everything))
            return draw(laws(vocab, order[:cut])), draw(laws(vocab, order[cut:]))
        p = draw(laws(vocab, everything))
        return p, p if kind == "equal" else draw(laws(vocab, everything))

    pairs = [pair() for _ in range(draw(st.integers(2, 6)))]
    # Each context picks one of the pairs: rows differ, and a row out of place shows.
    picks = torch.tensor(
        draw(st.lists(st.integers(0, len(pairs) - 1), min_size=vocab**2, max_size=vocab**2))
    ).reshape(vocab, vocab)
    p, q = (table(*rows)[picks] for rows in zip(*pairs, strict=True))
    return p, q, k
