"""The four verdicts, and the result of the chi-squared check as it is stored and shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["PASS", "FAIL", "LOSSY", "INCONCLUSIVE"]


@dataclass(frozen=True, slots=True)
class ChiSquaredVerdict:
    """One strategy's continuations against the target's exact law, over all branch prompts together.

    `reason` is one sentence. `effective_df` is what remains after pooling; `tv_upper` is the 99 % upper
    confidence bound for the TV distance of the pooled table; `smallest_detectable_tv` is the distance
    these `draws` would have found with probability .99 at `alpha`.
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
