"""The four verdicts, and the result of the chi-squared check as it is stored and shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Verdict = Literal["PASS", "FAIL", "LOSSY", "INCONCLUSIVE"]


@dataclass(frozen=True, slots=True)
class CellCount:
    """One cell of a pooled table of continuations: how many draws were expected in it, and how many came.

    `tokens` are the continuation it holds if `is_whole`; else what all of its continuations begin with;
    None for the tail of what is left. `text` is theirs, None without a tokenizer.
    """

    tokens: tuple[int, ...] | None
    text: str | None
    is_whole: bool
    expected: float
    observed: int


@dataclass(frozen=True, slots=True)
class PooledTable:
    """The pooled table of one branch prompt."""

    prompt: tuple[int, ...]
    text: str | None
    cells: tuple[CellCount, ...]


@dataclass(frozen=True, slots=True)
class ChiSquaredVerdict:
    """One strategy's continuations against the target's exact law, over all branch prompts together.

    `reason` is one sentence. `effective_df` is what remains after pooling; `tv_upper` is the 99 % upper
    confidence bound for the TV distance of the pooled table; `smallest_detectable_tv` is the distance
    these `draws` would have found with probability .99 at `alpha`. `tables` is by branch prompt, empty
    where nothing was judged.
    """

    strategy: str
    verdict: Verdict
    reason: str
    lossless_claimed: bool
    dtype: str
    temperature: float
    top_k: int
    prompts: int
    draws: int
    horizon: int
    statistic: float | None
    df: int | None
    p_value: float | None
    alpha: float
    tv_observed: float | None
    tv_upper: float | None
    smallest_detectable_tv: float | None
    out_of_support: int
    drafted: int
    accepted: int
    rejections: int
    fully_accepted: int
    seconds: float
    injected: str | None = None
    tables: tuple[PooledTable, ...] = ()


EvidenceKind = Literal["log e", "p", "exact"]


@dataclass(frozen=True, slots=True)
class ComponentResult:
    """What one companion test found about one strategy; `budget.combine` makes the verdict of several.

    `evidence` is what `kind` says: the largest log e-value so far (an alarm from log(1 / `alpha`)), a p-value
    (an alarm up to `alpha`), or the number of violations of something that cannot happen under the null
    (an alarm from 1; `alpha` is 0). None when nothing was tested. `tokens` were looked at. `words` is one
    sentence. `conclusive` is False when the test could not have noticed, or may not be believed, which is
    never a pass.
    """

    name: str
    alarm: bool
    evidence: float | None
    kind: EvidenceKind
    alpha: float
    tokens: int
    words: str
    conclusive: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """A token to look at again: what reproduces it, and what was odd about it.

    It is the `offset`-th output token of a request with this prompt and seed, decoded in this regime.
    `log_factor` is what it alone adds to the evidence for `alternative`.
    """

    regime: str
    prompt: tuple[int, ...]
    seed: int
    offset: int
    token: int
    log_factor: float
    alternative: str


@dataclass(frozen=True, slots=True)
class EffectRecord:
    """How far the output is from the target in the best-fitting direction: TV per token, a lower bound."""

    direction: str
    tv: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Traces:
    """What plots are drawn from, of bounded size; no verdict depends on it.

    After each of `tokens` (of all regimes together, from 0 on), `log_e` is the logarithm of the e-value of
    the whole e-process, and `log_e_by_regime` that of each regime alone, which stands still while others
    take their turn. Thinned evenly, but the largest `log_e` and the last are there. `pit` counts the
    emitted tokens of each regime by their randomised PIT value, in bins of equal width.
    """

    tokens: tuple[int, ...]
    log_e: tuple[float, ...]
    log_e_by_regime: dict[str, tuple[float, ...]]
    pit: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class FloorRow:
    """How far ordinary decoding of `batch` rows, `width` tokens each, is from something else.

    `against` is "reference", or another batch and width of ordinary decoding. TV per token: its mean, and
    the .99 quantile over `tokens` contexts.
    """

    batch: int
    width: int
    against: str
    tokens: int
    mean: float
    high: float


@dataclass(frozen=True, slots=True)
class FloorRecord:
    """What rounding does to ordinary decoding in lower precision, measured before anything is judged.

    `reference` says what scored the output. `margin` is the mean shift per token from the reference that
    accuses nobody, `paired_margin` that between speculation on and off, both in TV, and `largest_shift` the
    largest that was measured, in `direction`. `regret` is the tolerance at temperature 0, in logits.
    `continuation` bounds the TV of whole continuations at two widths; None where they were not drawn.
    """

    reference: str
    rows: tuple[FloorRow, ...]
    margin: float
    paired_margin: float
    largest_shift: float
    direction: str
    regret: float
    continuation: float | None = None


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """What the audit says of one strategy, as it is stored and shown.

    `log_e` is the largest log e-value and `bar` what it must reach for an alarm, which then came after
    `tokens_at_alarm` tokens; `family`, `alternative` and `regime` say what fits best, whatever the verdict.
    `detectable` gives, per direction, the TV per token that would have been found with probability .99, or
    all that there is to find where that is less. `acceptance` is by regime, of the
    positions that had a draft and were reached; None where nothing was drafted. `traces` is None in audits
    that were stored before there were any.

    In lower precision `log_e` and `alternative` are those of the paired test (`family` "paired"), or of the
    "margin" where that alone alarmed, `effect` is that of speculation on against off, `tokens` are those of
    one arm, and `floor` is what was measured of the precision itself.
    """

    strategy: str
    verdict: Verdict
    reasons: tuple[str, ...]
    components: tuple[ComponentResult, ...]
    budget: str
    promised_tv: float
    tokens: int
    sequences: int
    prompts: int
    dtype: str
    alpha: float
    log_e: float
    bar: float
    tokens_at_alarm: int | None
    family: str
    alternative: str
    regime: str
    effect: EffectRecord | None
    detectable: Mapping[str, float | None]
    acceptance: Mapping[str, float | None]
    drafted: int
    accepted: int
    rejected: int
    contracts_held: int
    contracts_tried: int
    chi_squared: ChiSquaredVerdict | None
    lossless_claimed: bool
    seconds: Mapping[str, float]
    worst: Place | None = None
    injected: str | None = None
    traces: Traces | None = None
    floor: FloorRecord | None = None

    @property
    def least_visible(self) -> tuple[str, float | None]:
        """Return the direction in which the most could hide, and how much (None: anything)."""
        return max(self.detectable.items(), key=lambda pair: math.inf if pair[1] is None else pair[1])


def chi_squared_component(stored: ChiSquaredVerdict) -> ComponentResult:
    """Return a stored chi-squared check in the form of a component; a token outside the support is exact."""
    name, tokens = "chi-squared", stored.draws * stored.horizon
    if stored.out_of_support:
        words = f"{stored.out_of_support} continuations that the target cannot produce"
        return ComponentResult(name, True, float(stored.out_of_support), "exact", 0.0, tokens, words)
    if stored.p_value is None:
        return ComponentResult(name, False, None, "p", stored.alpha, tokens, stored.reason, conclusive=False)
    words = f"p = {stored.p_value:.2g} with {stored.df} degrees of freedom over {stored.draws} draws"
    alarm = stored.p_value <= stored.alpha
    return ComponentResult(name, alarm, stored.p_value, "p", stored.alpha, tokens, words)


def summed_up(record: AuditRecord) -> ChiSquaredVerdict:
    """Return the chi-squared check of a full audit under the verdict of the whole of it; no tables."""
    checked = record.chi_squared
    if checked is None:  # stopped at an alarm before it
        checked = ChiSquaredVerdict(
            strategy=record.strategy,
            verdict=record.verdict,
            reason="",
            lossless_claimed=record.lossless_claimed,
            dtype=record.dtype,
            temperature=1.0,
            top_k=0,
            prompts=0,
            draws=0,
            horizon=0,
            statistic=None,
            df=None,
            p_value=None,
            alpha=record.alpha,
            tv_observed=None,
            tv_upper=None,
            smallest_detectable_tv=None,
            out_of_support=0,
            drafted=record.drafted,
            accepted=record.accepted,
            rejections=record.rejected,
            fully_accepted=0,
            seconds=0.0,
        )
    verdict, reason, injected = record.verdict, record.reasons[0], record.injected
    return replace(checked, verdict=verdict, reason=reason, injected=injected, tables=())
