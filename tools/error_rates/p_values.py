"""Whether the audit's p-values are what they say: at most a share a of them at or below a, under the null.

Every data set is drawn from the law that it is tested against, or both of its arms from one law. The
simulated and permuted p-values count the observed statistic among the others, so P(p <= a) <= a holds
exactly, for every a. How far they stay below is printed; it costs power, not trust.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from scipy import stats

from specbench.audit import chi_squared, continuations, toy, two_sample
from specbench.audit.chi_squared import Continuation, ExpectedTable
from specbench.engines.base import Opened

BATCH = 100
P_VALUES = 10_000
"""P-values of each kind, so that a share of .01 is known to .001."""
FEWEST = 4000
LEVELS = (0.05, 0.01)
ALPHA = 0.01
"""The level that p-values are computed for: 1,000 simulated tables each."""
CHANCE = 0.01
"""How often right p-values may look wrong, over all kinds and levels together."""

VOCAB, CONTEXTS, DRAFT, EOS = 4, 16, 3, 1
PROMPTS = ((0, 2), (3, 0), (2, 2))
DRAWS = 300
"""Continuations per prompt."""
LAWS = ((0.4, 0.3, 0.15, 0.1, 0.03, 0.02), (0.7, 0.2, 0.06, 0.04))
"""What the tables without a decoder are drawn from; the rare categories are pooled at these draws."""
REQUESTS, SAMPLES = 30, 4
"""Requests per arm and samples of each, where samples of one request are alike."""
ALIKE = 0.3
"""The chance that a sample repeats its request's first."""


def one_sample(rng: np.random.Generator, batch: int) -> Iterator[float]:
    """Yield p-values of the chi-squared test on two tables that follow their law."""
    del batch
    tables = [ExpectedTable({(i,): share for i, share in enumerate(law)}) for law in LAWS]
    for _ in range(BATCH):
        drawn = [[(int(i),) for i in rng.choice(len(law), DRAWS, p=law)] for law in LAWS]
        result = chi_squared.judge(list(zip(tables, drawn, strict=True)), alpha=ALPHA, generator=rng)
        assert result.p_value is not None
        yield result.p_value


def exact_continuations(rng: np.random.Generator, batch: int) -> Iterator[float]:
    """Yield p-values of the check of whole continuations, as an audit makes them of a lossless decoder.

    The decoder is the toy's, its rule another for every batch; each draws with k + 3 tokens and EOS.
    """
    rule = toy.RULES[batch % len(toy.RULES)]
    pair, laws = _toy()
    if rule == "argmax":
        pair = pair.with_argmax_draft()
    horizon = DRAFT + 3
    plan = continuations.Plan(horizon, (DRAWS,) * len(PROMPTS), laws, ALPHA)
    prompts = np.repeat(np.array(PROMPTS * BATCH), DRAWS, axis=0)
    decoded = toy.decode(
        pair, rng, sequences=len(prompts), length=horizon, k=DRAFT, rule=rule, eos=EOS, prompts=prompts
    )
    texts = [
        tuple(tokens[:length])
        for tokens, length in zip(decoded.tokens.tolist(), decoded.lengths.tolist(), strict=True)
    ]
    for first in range(0, len(texts), len(PROMPTS) * DRAWS):
        each = [texts[first + i * DRAWS : first + (i + 1) * DRAWS] for i in range(len(PROMPTS))]
        # What speculation did is not part of the p-value.
        drawn = continuations.Drawn(tuple(map(tuple, each)), 1, 1, 1, 1, 0)
        verdict = continuations.verdict(
            Opened(rule, lossless=True, max_draft=DRAFT),
            plan,
            drawn,
            prompts=PROMPTS,
            text=None,
            seed=int(rng.integers(2**62)),
            dtype="float64",
            seconds=0.0,
            injected=None,
        )
        assert verdict.p_value is not None
        assert not verdict.out_of_support
        yield verdict.p_value


@cache
def _toy() -> tuple[toy.ToyPair, tuple[ExpectedTable, ...]]:
    pair = toy.ToyPair.make(VOCAB, contexts=CONTEXTS, spread=(0.5, 1.5))
    floor = continuations.MINIMUM_SHARE / 10
    return pair, tuple(law_of(pair, prompt, DRAFT + 3, EOS, floor) for prompt in PROMPTS)


def law_of(pair: toy.ToyPair, prompt: Sequence[int], horizon: int, eos: int, floor: float) -> ExpectedTable:
    """Return the exact law of what follows a prompt; branches rarer than `floor` are not followed further."""
    finished: dict[Continuation, float] = {}
    truncated = set()
    frontier: dict[Continuation, float] = {(): 1.0}
    for length in range(1, horizon + 1):
        grown: dict[Continuation, float] = {}
        for text, mass in frontier.items():
            before, last = (*prompt, *text)[-2:]
            context = int(pair.context(np.array(before), np.array(last)))
            for token, share in enumerate(pair.p[context].tolist()):
                child = (*text, token)
                if token == eos or length == horizon:
                    finished[child] = mass * share
                elif mass * share < floor:
                    finished[child] = mass * share
                    truncated.add(child)
                else:
                    grown[child] = mass * share
        frontier = grown
    return ExpectedTable(finished, frozenset(truncated))


def permuted(rng: np.random.Generator, batch: int) -> Iterator[float]:
    """Yield p-values of the two-sample test on independent draws of two laws."""
    del batch
    for _ in range(BATCH):
        arms = []
        for law in LAWS:
            draws = rng.choice(len(law), 2 * DRAWS, p=law).tolist()
            arms.append(two_sample.Arms(draws[:DRAWS], draws[DRAWS:]))
        yield _two_sample(arms, rng)


def permuted_by_request(rng: np.random.Generator, batch: int) -> Iterator[float]:
    """Yield p-values of the two-sample test where samples of one request are alike."""
    del batch
    owners = np.repeat(np.arange(REQUESTS), SAMPLES).tolist()
    half = REQUESTS * SAMPLES
    for _ in range(BATCH):
        arms = []
        for law in LAWS:
            draws = rng.choice(len(law), (2 * REQUESTS, SAMPLES), p=law)
            alike = np.where(rng.random(draws.shape) < ALIKE, draws[:, :1], draws).ravel().tolist()
            arms.append(two_sample.Arms(alike[:half], alike[half:], owners, owners))
        yield _two_sample(arms, rng)


def _two_sample(arms: Sequence[two_sample.Arms], rng: np.random.Generator) -> float:
    result = two_sample.judge(arms, alpha=ALPHA, generator=rng)
    assert result.p_value is not None
    return result.p_value


KINDS: Mapping[str, Callable[[np.random.Generator, int], Iterator[float]]] = {
    "chi-squared": one_sample,
    "continuations": exact_continuations,
    "label permutation": permuted,
    "label permutation by request": permuted_by_request,
}


def setup(seed: int) -> dict[str, Any]:
    """Return what the log's figures depend on."""
    return {"alpha": ALPHA, "draws": DRAWS, "seed": seed}


def batch_of(kind: str, batch: int, seed: int) -> list[float]:
    """Return one batch of p-values; its random numbers depend on the seed, the kind and the batch alone."""
    rng = np.random.default_rng([seed, zlib.crc32(kind.encode()), batch])
    return [round(p, 7) for p in KINDS[kind](rng, batch)]


def summary_of_kind(p_values: Sequence[float], *, looks: int) -> dict[str, Any]:
    """Summarise p-values under the null.

    The number at or below a is at most the 1 - `CHANCE` / `looks` quantile of the binomial law with
    chance a; the lower quantile is there to be compared with, and nothing depends on it.
    """
    num = len(p_values)
    levels = []
    for level in LEVELS:
        count = sum(p <= level for p in p_values)
        least, most = (int(stats.binom.ppf(at, num, level)) for at in (CHANCE / looks, 1 - CHANCE / looks))
        levels.append(
            {
                "level": level,
                "count": count,
                "share": count / num,
                "least_if_uniform": least / num,
                "most": most / num,
                "holds": count <= most,
            }
        )
    return {"p_values": num, "levels": levels, "holds": all(level["holds"] for level in levels)}


def summary(done: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Summarise every kind of p-value."""
    found = {kind: done[kind] for kind in KINDS if done.get(kind)}
    looks = max(1, len(found) * len(LEVELS))
    kinds = {kind: summary_of_kind(values, looks=looks) for kind, values in found.items()}
    enough = len(found) == len(KINDS) and min(map(len, found.values())) >= FEWEST
    holds = all(kind["holds"] for kind in kinds.values())
    return {"kinds": kinds, "holds": enough or None if holds else False}
