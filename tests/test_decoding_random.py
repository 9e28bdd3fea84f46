"""Counter-based uniforms: even, unrelated to one another, and a function of what they decide alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats
from torch import Tensor

from specbench.decoding.random_numbers import Purpose, RoundRandom, stream_keys, uniforms

NUM = 1 << 16
ALPHA = 1e-4
"""Level of each statistical test here; all seeds are fixed, so the answers are too."""


def stream(
    seed: int = 0,
    purpose: Purpose = Purpose.TARGET,
    first: int = 0,
    number: int | None = 0,
    num: int = NUM,
) -> Tensor:
    """Return the uniforms of `num` consecutive positions, `[num]`."""
    keys = stream_keys([seed])[:, purpose]
    positions = torch.arange(first, first + num)[None]
    return uniforms(keys, positions, None if number is None else torch.tensor([number]))[0]


def over_seeds(position: int = 0, number: int = 0, purpose: Purpose = Purpose.COIN, first: int = 0) -> Tensor:
    """Return the uniforms of one position of many requests, `[NUM]`."""
    keys = stream_keys(range(first, first + NUM))[:, purpose]
    return uniforms(keys, torch.full((NUM, 1), position), torch.full((NUM,), number))[:, 0]


STREAMS = {
    "positions": lambda: stream(),
    "positions, no round": lambda: stream(number=None),
    "positions of a late round": lambda: stream(seed=77, purpose=Purpose.DRAFT, number=1000),
    "seeds": lambda: over_seeds(),
    "seeds of a late position": lambda: over_seeds(position=127, number=40),
    "rounds": lambda: torch.cat(
        [
            uniforms(
                stream_keys([3])[:, Purpose.COIN].expand(4096), torch.full((4096, 1), i), torch.arange(4096)
            )
            for i in range(16)
        ]
    ).flatten(),
}


@pytest.mark.parametrize("name", STREAMS)
def test_uniforms_are_uniform(name: str) -> None:
    """Along positions, rounds and seeds, the numbers lie inside (0, 1) and spread evenly."""
    numbers = STREAMS[name]()
    assert numbers.dtype == torch.float64
    assert len(numbers) == NUM
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert stats.kstest(numbers.numpy(), "uniform").pvalue > ALPHA
    counts = torch.histc(numbers, bins=256, min=0, max=1).numpy()
    assert stats.chisquare(counts).pvalue > ALPHA
    assert numbers.unique().numel() == NUM  # 52 bits: a repeat would be a shared number
    # The low bits too: a part in 2^16 of the interval is itself spread evenly.
    assert stats.kstest((numbers * 2.0**16 % 1).numpy(), "uniform").pvalue > ALPHA


PAIRS = {
    **{
        f"{one.name} and {other.name}": lambda one=one, other=other: (
            stream(purpose=one),
            stream(purpose=other),
        )
        for one, other in itertools.combinations(Purpose, 2)
    },
    "neighbouring positions": lambda: (stream(), stream(first=1)),
    "positions k + 1 apart": lambda: (stream(), stream(first=4)),
    "neighbouring positions of many seeds": lambda: (over_seeds(0), over_seeds(1)),
    "neighbouring rounds": lambda: (stream(number=3), stream(number=4)),
    "neighbouring rounds of many seeds": lambda: (over_seeds(number=0), over_seeds(number=1)),
    "next position in the next round": lambda: (stream(number=3), stream(number=4, first=1)),
    "position and round exchanged": lambda: (over_seeds(2, 5), over_seeds(5, 2)),
    "with and without a round": lambda: (stream(number=0), stream(number=None)),
    "neighbouring seeds": lambda: (stream(seed=0), stream(seed=1)),
    "neighbouring seeds, one position": lambda: (over_seeds(), over_seeds(first=1)),
    "seeds that differ in the highest bit": lambda: (stream(seed=5), stream(seed=5 + 2**63)),
    "purposes of many seeds": lambda: (over_seeds(), over_seeds(purpose=Purpose.RESIDUAL)),
    "next purpose at the position before": lambda: (
        stream(purpose=Purpose.COIN, first=1),
        stream(purpose=Purpose.RESIDUAL),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_streams_have_nothing_in_common(name: str) -> None:
    """Pairs of purposes, positions, rounds and seeds are uncorrelated, and spread evenly over the square."""
    one, other = PAIRS[name]()
    assert (one != other).all()
    assert stats.pearsonr(one.numpy(), other.numpy()).pvalue > ALPHA
    cells = (one * 16).long() * 16 + (other * 16).long()
    assert stats.chisquare(cells.bincount(minlength=256).numpy()).pvalue > ALPHA


def test_numbers_do_not_depend_on_the_batch() -> None:
    """A request's numbers are the same alone, in another row, and in a wider request for more of them."""
    seeds, positions, rounds = [5, 6, 7, 5], torch.tensor([0, 3, 9, 2]), torch.tensor([0, 1, 4, 8])
    for purpose, by_round in itertools.product(Purpose, (True, False)):
        batch = RoundRandom(stream_keys(seeds), positions, rounds).uniform(purpose, 5, by_round=by_round)
        for row, seed in enumerate(seeds):
            alone = RoundRandom(stream_keys([seed]), positions[row : row + 1], rounds[row : row + 1])
            assert torch.equal(alone.uniform(purpose, 5, by_round=by_round)[0], batch[row])
            assert torch.equal(alone.uniform(purpose, 2, by_round=by_round)[0], batch[row, :2])
        order = torch.tensor([2, 0, 3, 1])
        turned = RoundRandom(stream_keys([seeds[i] for i in order]), positions[order], rounds[order])
        assert torch.equal(turned.uniform(purpose, 5, by_round=by_round), batch[order])


def test_consecutive_numbers_belong_to_consecutive_positions() -> None:
    """Column i of a round is the number of position `first + i`, whichever round starts where."""
    keys, round_of = stream_keys([9]), torch.tensor([2])
    early = RoundRandom(keys, torch.tensor([4]), round_of).uniform(Purpose.TARGET, 4)
    late = RoundRandom(keys, torch.tensor([6]), round_of).uniform(Purpose.TARGET, 2)
    assert torch.equal(early[:, 2:], late)


def test_the_round_matters_only_where_it_should() -> None:
    """By round, the same position gets a new number each round; otherwise the same one."""
    keys, position = stream_keys([9]), torch.tensor([4])
    first, second = (RoundRandom(keys, position, torch.tensor([i])) for i in (0, 1))
    assert (first.uniform(Purpose.COIN, 8) != second.uniform(Purpose.COIN, 8)).all()
    assert torch.equal(
        first.uniform(Purpose.TARGET, 8, by_round=False), second.uniform(Purpose.TARGET, 8, by_round=False)
    )


def test_any_integer_is_a_seed() -> None:
    """Negative and huge seeds work; seeds that agree modulo 2^64 are one seed, others are not."""
    seeds = [0, -1, 2**63 - 1, 2**63, 1 - 2**63, 2**64 - 2, 10**30]
    keys = stream_keys(seeds)
    assert keys.dtype == torch.int64
    assert keys.unique().numel() == keys.numel()
    assert torch.equal(stream_keys([-1]), stream_keys([2**64 - 1]))
    assert torch.equal(stream_keys([2**63]), stream_keys([-(2**63)]))
    assert torch.equal(stream_keys([10**30]), stream_keys([10**30 % 2**64]))
    for seed in seeds:
        assert stats.kstest(stream(seed=seed, num=4096).numpy(), "uniform").pvalue > ALPHA


def test_keys_of_many_seeds_and_purposes_are_distinct() -> None:
    """No two of a hundred thousand neighbouring requests share a stream."""
    keys = stream_keys(range(100_000))[:, 1:]
    assert keys.unique().numel() == keys.numel()


def test_an_ordinary_round_asks_for_no_numbers() -> None:
    """A round without drafts has no coins: an empty row, not an error."""
    random = RoundRandom(stream_keys([1, 2]), torch.tensor([0, 0]), torch.tensor([0, 0]))
    assert random.uniform(Purpose.COIN, 0).shape == (2, 0)


PINNED = {
    Purpose.TARGET: [0.40888044555588665, 0.08406889723896771],
    Purpose.DRAFT: [0.5162900872713126, 0.18597765750244066],
    Purpose.COIN: [0.16211838321222405, 0.14188958598950008],
    Purpose.RESIDUAL: [0.36447072041097706, 0.14982146030680343],
}
"""Round 0, positions 0 and 1 of seed 0. Recorded: a change here changes every result under a seed."""


def split_mix(x: int) -> int:
    """Finalise 64 bits as SplitMix64 does, in Python's integers."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@pytest.mark.parametrize("purpose", Purpose, ids=lambda purpose: purpose.name)
def test_the_first_numbers_are_pinned(purpose: Purpose) -> None:
    """The first numbers of seed 0 are those that were published with earlier results."""
    random = RoundRandom(stream_keys([0]), torch.tensor([0]), torch.tensor([0]))
    assert random.uniform(purpose, 2)[0].tolist() == PINNED[purpose]


def test_a_number_without_a_round_is_pinned() -> None:
    """Ordinary decoding and exact match start from the same recorded numbers."""
    random = RoundRandom(stream_keys([0, 1]), torch.tensor([0, 5]), torch.tensor([0, 3]))
    numbers = random.uniform(Purpose.TARGET, 2, by_round=False)
    assert numbers.tolist() == [
        [0.18383979100743952, 0.6250937004946516],
        [0.2238705637914301, 0.17400543103366928],
    ]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 10**30])
def test_the_hash_is_split_mix(seed: int) -> None:
    """Int64 tensor arithmetic gives what unbounded integers give modulo 2^64."""
    golden = 0x9E3779B97F4A7C15
    for purpose, position, number in itertools.product(Purpose, (0, 7), (0, 3)):
        x = split_mix((seed + golden) % 2**64)
        for field in (purpose, position, number):
            x = split_mix((x + (field + 1) * golden) % 2**64)
        expected = ((x >> 12) + 0.5) * 2.0**-52
        assert float(stream(seed, purpose, position, number, num=1)) == expected
