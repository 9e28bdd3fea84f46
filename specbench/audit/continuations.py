"""The chi-squared check of one run: whole continuations of fixed branch prompts, against the exact law.

The number of draws is fixed before any is made: the law says which cells pooling will leave, hence the
degrees of freedom, hence how many draws find a TV distance of `DETECTABLE_TV` with probability .99.
Horizon k + 3: a continuation must reach beyond a fully accepted round, and its first token, sampled from
the prefill, never passes the verifier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench import stats
from specbench.audit.chi_squared import Cell, ChiSquaredResult, ExpectedTable, judge, pool_by_prefix
from specbench.audit.verdicts import CellCount, ChiSquaredVerdict, PooledTable, Verdict
from specbench.engines.base import Engine, Opened
from specbench.records import Request, SamplingParams, Schedule
from specbench.runtime.events import Finished, Stepped

if TYPE_CHECKING:
    from specbench.audit.reference import Oracle
    from specbench.runtime.protocols import Strategy

RUN_ALPHA = 1e-3
"""The chance that a run with only correct strategies reports one as FAIL."""
DETECTABLE_TV = 0.05
TOP_K = 3
MINIMUM_EXPECTED = 10.0
MINIMUM_SHARE = 0.05
"""The least share of a prompt's draws that a cell of its own must expect: few cells need fewer draws."""
FEWEST_DRAWS = 200
_MARGIN = 1.02  # more draws than the formula asks for, since pooling depends on their number

BRANCH_PROMPTS = (
    "Shopping list: apples, pears, plums, apples, pears, figs, apples, pears,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef",
    "The cat sat on the mat. The dog sat on the rug. The cat sat on the",
)
"""Texts that repeat themselves, so that a drafter that copies has something to offer, and to get wrong."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one strategy will be asked for: `draws[i]` continuations of `horizon` tokens of prompt i."""

    horizon: int
    draws: tuple[int, ...]
    laws: tuple[ExpectedTable, ...]
    alpha: float
    detectable_tv: float = DETECTABLE_TV


SamplingOf = Callable[[int, int], SamplingParams]
"""The sampling of a continuation, from its horizon and seed."""


def sampling(horizon: int, seed: int = 0) -> SamplingParams:
    """Return the usual sampling of the check: temperature 1 among the 3 most likely tokens."""
    return SamplingParams(temperature=1.0, top_k=TOP_K, seed=seed, max_new_tokens=horizon)


def plan(
    oracle: Oracle,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_draft: int,
    alpha: float,
    detectable_tv: float = DETECTABLE_TV,
) -> Plan:
    """Fix the number of draws from the law alone.

    Args:
        oracle: scores the target; its sampling must be that of `sampling`.
        prompts: branch prompts as token ids.
        max_draft: the longest draft of the strategy, k.
        alpha: this strategy's share of the run's error budget.
        detectable_tv: the distance that is to be found with probability .99.
    """
    horizon = max_draft + 3
    # Pooling joins whatever is rarer than its share, so branches far below that need not be told apart.
    laws = [oracle.continuation_law(prompt, horizon, floor=MINIMUM_SHARE / 10) for prompt in prompts]
    each = FEWEST_DRAWS
    while True:
        cells = [_cells(law, each) for law in laws]
        # A prompt with one cell tests nothing but the support: its draws do not count.
        tested = sum(number > 1 for number in cells)
        needed = stats.draws_needed(detectable_tv, sum(cells) - len(cells), alpha) if tested else 0
        if each * tested >= _MARGIN * needed:
            draws = tuple(each if number > 1 else FEWEST_DRAWS for number in cells)
            return Plan(horizon, draws, tuple(laws), alpha, detectable_tv)
        each = max(each + 50, int(_MARGIN * needed / tested) + 1)


def _cells(law: ExpectedTable, draws: int) -> int:
    return len(pool_by_prefix(law, draws, minimum_expected(draws)).names)


def minimum_expected(draws: int) -> float:
    """Return the expected count below which a cell joins the tail."""
    return max(MINIMUM_EXPECTED, MINIMUM_SHARE * draws)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The continuations of one strategy, by prompt, and what speculation did meanwhile."""

    continuations: tuple[tuple[tuple[int, ...], ...], ...]
    drafted: int
    accepted: int
    rejections: int
    fully_accepted: int
    failures: int


def draw(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    plan: Plan,
    *,
    seed: int,
    sampling_of: SamplingOf = sampling,
    progress: Callable[[int], None] | None = None,
) -> Drawn:
    """Draw the planned continuations with the strategy that `engine` has open.

    All samples of a prompt share one prefill; each has its own stream of random numbers. As many are drawn
    at a time as the engine has rows, or fewer where a length policy would not draft with so many.
    """
    rows = _concurrency(engine)
    results: list[tuple[tuple[int, ...], ...]] = []
    drafted = accepted = rejections = full = failures = 0
    for number, (prompt, draws) in enumerate(zip(prompts, plan.draws, strict=True)):
        requests = tuple(
            Request(
                i,
                prompt,
                sampling_of(plan.horizon, seed * 1_000_003 + number * 100_003 + i),
                f"branch-{number}",
            )
            for i in range(draws)
        )
        outputs: dict[int, tuple[int, ...]] = {}
        for event in engine.serve(Schedule(requests, concurrency=rows, share_prefill=True)):
            if isinstance(event, Finished):
                outputs[event.record.request] = event.record.output_tokens
                failures += event.record.error is not None
                if progress is not None:
                    progress(1)
            for entry in event.rounds if isinstance(event, Stepped) else ():
                drafted += entry.drafted
                accepted += entry.accepted
                rejections += entry.rejected
                full += entry.draft_depth > 0 and entry.accepted == entry.draft_depth
        failures += draws - len(outputs)
        results.append(tuple(outputs[i] for i in sorted(outputs)))
    return Drawn(tuple(results), drafted, accepted, rejections, full, failures)


def _concurrency(engine: Engine) -> int:
    rows: int = getattr(engine, "rows", 1)
    strategy: Strategy | None = getattr(engine, "strategy", None)
    lively = strategy.policy.lively_batch if strategy is not None and strategy.drafter is not None else None
    return rows if lively is None else min(rows, lively)


TextOf = Callable[[Sequence[int]], str]


def verdict(
    opened: Opened,
    plan: Plan,
    drawn: Drawn,
    *,
    prompts: Sequence[tuple[int, ...]],
    text: TextOf | None,
    seed: int,
    dtype: str,
    seconds: float,
    injected: str | None,
) -> ChiSquaredVerdict:
    """Judge what was drawn. Never PASS where nothing could have been noticed."""
    result: ChiSquaredResult | None = None
    if not drawn.failures:
        result = judge(
            list(zip(plan.laws, drawn.continuations, strict=True)),
            alpha=plan.alpha,
            generator=np.random.default_rng(seed),
            minimum_expected=minimum_expected(max(plan.draws)),
        )
    word, reason = _decide(opened, drawn, result, plan.detectable_tv)
    return ChiSquaredVerdict(
        strategy=opened.name,
        verdict=word,
        reason=reason,
        lossless_claimed=opened.lossless,
        dtype=dtype,
        temperature=1.0,
        top_k=TOP_K,
        prompts=len(plan.laws),
        draws=sum(plan.draws),
        horizon=plan.horizon,
        statistic=result.statistic if result else None,
        df=result.df if result else None,
        p_value=result.p_value if result else None,
        alpha=plan.alpha,
        tv_observed=result.tv_observed if result else None,
        tv_upper=result.tv_upper if result else None,
        smallest_detectable_tv=result.smallest_detectable_tv if result else None,
        out_of_support=result.out_of_support if result else 0,
        drafted=drawn.drafted,
        accepted=drawn.accepted,
        rejections=drawn.rejections,
        fully_accepted=drawn.fully_accepted,
        seconds=seconds,
        injected=injected,
        tables=_tables(prompts, plan.laws, result, text) if result else (),
    )


def _tables(
    prompts: Sequence[tuple[int, ...]],
    laws: Sequence[ExpectedTable],
    result: ChiSquaredResult,
    text: TextOf | None,
) -> tuple[PooledTable, ...]:
    """Return the pooled tables as they are stored, with their words where there is a tokenizer."""

    def words(tokens: tuple[int, ...] | None) -> str | None:
        return None if text is None or tokens is None else text(tokens)

    def stored(law: ExpectedTable, cell: Cell) -> CellCount:
        tokens = cell.continuation
        is_whole = tokens is not None and tokens in law.continuations and tokens not in law.truncated
        return CellCount(tokens, words(tokens), is_whole, cell.expected, cell.observed)

    return tuple(
        PooledTable(prompt, words(prompt), tuple(stored(law, cell) for cell in cells))
        for prompt, law, cells in zip(prompts, laws, result.cells, strict=True)
    )


def _decide(
    opened: Opened, drawn: Drawn, result: ChiSquaredResult | None, detectable_tv: float
) -> tuple[Verdict, str]:
    if result is None:
        return "INCONCLUSIVE", f"{drawn.failures} requests failed, and that may depend on what they said"
    if not opened.lossless:
        return "LOSSY", "the strategy declares that it changes the distribution; the distance is shown"
    if result.out_of_support:
        return "FAIL", f"{result.out_of_support} continuations that the target cannot produce"
    if result.p_value is None:
        return "INCONCLUSIVE", "every branch prompt has a single continuation: nothing could be tested"
    if result.is_rejected:
        return "FAIL", f"p = {result.p_value:.2g} is below {result.alpha:.2g}: another distribution"
    if opened.max_draft and not drawn.drafted:
        return "INCONCLUSIVE", "nothing was drafted, so speculation was not tested"
    if opened.max_draft and not (drawn.accepted and (drawn.rejections or drawn.fully_accepted)):
        return "INCONCLUSIVE", "no draft token was accepted, so acceptance was not tested"
    smallest = result.smallest_detectable_tv
    if smallest is None or smallest > detectable_tv:
        return "INCONCLUSIVE", f"too few draws to find a TV distance of {detectable_tv:g}"
    return "PASS", f"p = {result.p_value:.2g}; a TV distance of {smallest:.3f} would have been found"


def check(
    engine: Engine,
    oracle_for: Callable[[int], Oracle],
    sampling_of: SamplingOf,
    strategies: Sequence[str],
    prompts: Sequence[tuple[int, ...]],
    *,
    alpha: float,
    seed: int,
    dtype: str,
    detectable_tv: float = DETECTABLE_TV,
    alter: Callable[[Strategy], Strategy] | None = None,
    injected: str | None = None,
    on_plan: Callable[[str, Plan], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[ChiSquaredVerdict]:
    """Check each strategy in turn.

    Args:
        engine: decodes; its target runs in `dtype`.
        oracle_for: gives the oracle for a horizon.
        sampling_of: the sampling of the draws, the oracle's but for the seed.
        strategies: what to check, as users write them.
        prompts: branch prompts as token ids.
        alpha: each strategy's share of the run's error budget.
        seed: of the draws and of the Monte Carlo p-value.
        dtype: printed beside the verdict; exact only in float32.
        detectable_tv: see `plan`.
        alter: breaks strategies on purpose.
        injected: the name of that fault, for the verdict.
        on_plan: told what is going to be drawn.
        progress: told of each finished continuation.
    """
    plans: dict[int, Plan] = {}
    has_tokenizer = getattr(engine, "tokenizer", None) is not None
    text: TextOf | None = getattr(engine, "text", None) if has_tokenizer else None
    for number, name in enumerate(strategies):
        began = time.perf_counter()
        opened = engine.open(name, alter=alter)
        if opened.max_draft not in plans:
            horizon = opened.max_draft + 3
            plans[opened.max_draft] = plan(
                oracle_for(horizon),
                prompts,
                max_draft=opened.max_draft,
                alpha=alpha,
                detectable_tv=detectable_tv,
            )
        planned = plans[opened.max_draft]
        if on_plan is not None:
            on_plan(name, planned)
        drawn = draw(engine, prompts, planned, seed=seed + number, sampling_of=sampling_of, progress=progress)
        yield verdict(
            opened,
            planned,
            drawn,
            prompts=prompts,
            text=text,
            seed=seed + number,
            dtype=dtype,
            seconds=time.perf_counter() - began,
            injected=injected,
        )


def branch_prompts(tokenizer: Any, texts: Sequence[str] = BRANCH_PROMPTS) -> list[tuple[int, ...]]:
    """Return the branch prompts as token ids, as plain text without a chat template."""
    return [tuple(tokenizer(text)["input_ids"]) for text in texts]
