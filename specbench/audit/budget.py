"""How false alarms and tokens are shared out over a run, and how component results become one verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specbench.audit.verdicts import ComponentResult, Verdict
from specbench.errors import UsageError, did_you_mean

RUN_ALPHA = 1e-3
"""The chance that a run with only correct strategies reports one as FAIL."""

Setting = Literal["in process", "lower precision", "server"]

SHARES: Mapping[Setting, Mapping[str, float]] = {
    "in process": {
        "e-process": 0.6,
        "chi-squared": 0.1,
        "collisions": 0.1,
        "acceptance": 0.05,
        "proposals": 0.05,
        "support": 0.05,
        "greedy regret": 0.05,
    },
    "lower precision": {
        "paired": 0.6,
        "margin": 0.1,
        "chi-squared": 0.1,
        "collisions": 0.1,
        "greedy regret": 0.1,
    },
    "server": {"paired": 0.6, "chi-squared": 0.3, "collisions": 0.1},
}
"""The share of each test. Acceptance and proposals have .1 together, and so have support and greedy regret.
In process support is exact, and the probe of parameters has its share; elsewhere it is its margin's."""


def alpha_for(
    test: str, *, setting: Setting, strategies: int, arms: int = 1, run_alpha: float = RUN_ALPHA
) -> float:
    """Return the level of one test of one strategy.

    Over all tests and strategies the levels add up to `run_alpha`, so that is a bound on the chance of any
    false alarm, however the tests depend on one another (Bonferroni).

    Args:
        test: A key of `SHARES`.
        setting: Where the decoder runs.
        strategies: How many are audited in this run, S.
        arms: How many independent uses of the test share this strategy's level.
        run_alpha: For the whole run.

    >>> alpha_for("collisions", setting="in process", strategies=4)
    2.5e-05
    """
    shares = SHARES[setting]
    if test not in shares:
        raise ValueError(f"no test '{test}' {setting}; expected one of {', '.join(shares)}")
    if strategies < 1 or arms < 1:
        raise ValueError(f"{strategies} strategies, {arms} arms; expected 1 or more of each")
    return shares[test] * run_alpha / (strategies * arms)


@dataclass(frozen=True, slots=True)
class Budget:
    """Scored tokens per strategy, over its regimes together, and what they promise to find.

    `promised_tv` is the largest that the smallest detectable TV of a systematic direction may be.
    `continuation_tv` is what the chi-squared test of continuations is to find, with probability .99.
    """

    name: str
    tokens: int
    promised_tv: float
    continuation_tv: float = 0.05


BUDGETS: Mapping[str, Budget] = {
    budget.name: budget
    for budget in (
        Budget("quick", 15_000, 0.04, continuation_tv=0.1),
        Budget("standard", 60_000, 0.02),
        Budget("deep", 150_000, 0.013, continuation_tv=0.015),
    )
}


def budget_named(name: str) -> Budget:
    """Return a budget by the name users type."""
    if name not in BUDGETS:
        raise UsageError(
            f"no budget '{name}'{did_you_mean(name, BUDGETS)}", hint=f"choose one of {', '.join(BUDGETS)}"
        )
    return BUDGETS[name]


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation did while it was audited, over all regimes: the proof that it was on."""

    drafted: int
    accepted: int
    rejected: int

    @property
    def missing(self) -> str | None:
        """Say what was never seen, or None when all was."""
        if not self.drafted:
            return "nothing was drafted"
        if not self.accepted:
            return "no draft token was accepted"
        return None if self.rejected else "no draft token was rejected"


@dataclass(frozen=True, slots=True)
class Control:
    """A decoder whose answer is known: an A/A arm must not alarm, an injected fault must."""

    name: str
    expected_alarm: bool
    alarm: bool

    @property
    def behaved(self) -> bool:
        """Return whether it did what it must."""
        return self.alarm == self.expected_alarm


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The verdict on one strategy. `reasons` are sentences, the decisive one first.

    `smallest_detectable` holds, per direction, the smallest TV distance that would have been found; None
    where not even 1 would.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    smallest_detectable: Mapping[str, float | None]


def combine(
    components: Sequence[ComponentResult],
    *,
    alpha: float,
    claims_lossless: bool,
    speculates: bool,
    speculation: Speculation,
    controls: Sequence[Control],
    smallest_detectable: Mapping[str, float | None],
    promised_tv: float,
    lost: int = 0,
) -> Conclusion:
    """Make one verdict of everything that was found about a strategy.

    - LOSSY: it declares itself lossy. Only what no declared law excuses, a broken contract, is still FAIL.
    - FAIL: an alarm that can be believed. Losses that may depend on content make a correct decoder alarm,
      except in what is exact; a reference that is wrong makes everything alarm but contracts, which need
      none, and then the A/A arm alarms too.
    - PASS: no alarm, every test conclusive, speculation proved, all controls behaved, and every direction's
      smallest detectable effect at or below the promise.
    - INCONCLUSIVE: anything else, all reasons named.

    PASS does not show that a decoder is lossless: it says that in the named directions a deviation of the
    promised size would have been noticed, on these prompts.

    Args:
        components: What the tests found. In lower precision and on servers their alarms must already be on
            evidence adjusted by the margin, or above the measured floor.
        alpha: This strategy's level; those of its components may not add up to more.
        claims_lossless: What the strategy declares.
        speculates: False for ordinary decoding audited as if it did (it needs no proof).
        speculation: What was drafted, accepted and rejected.
        controls: At least one A/A arm and one injected fault are needed for a PASS.
        smallest_detectable: TV per direction; at least one.
        promised_tv: By the budget.
        lost: Requests whose tokens are missing, for reasons that may depend on their content.

    Raises:
        ValueError: The components spend more than `alpha`.
    """
    spent = math.fsum(component.alpha for component in components)
    if spent > alpha * (1 + 1e-9):
        raise ValueError(f"the components' levels add up to {spent:g}; expected at most {alpha:g}")
    # What names a kind of fault comes first, then what is exact: a greedy output that breaks a contract does
    # not say why.
    alarms = sorted(
        (c for c in components if c.alarm), key=lambda c: (c.name != "e-process", c.kind != "exact")
    )
    contracts = [c for c in alarms if c.name.startswith("contract")]

    def concluded(verdict: Verdict, reasons: Sequence[str]) -> Conclusion:
        return Conclusion(verdict, tuple(reasons), dict(smallest_detectable))

    if not claims_lossless:
        if contracts:
            return concluded("FAIL", [_worded(c) for c in contracts])
        declared = "the strategy declares that it changes the distribution; the effect is shown"
        return concluded("LOSSY", [declared, *map(_worded, alarms)])
    doubts = _doubts_about_alarms(controls, lost)
    if any(control.alarm and not control.expected_alarm for control in controls):
        believed = contracts
    else:
        believed = [c for c in alarms if c.kind == "exact" or not lost]
    if believed:
        return concluded("FAIL", [_worded(c) for c in believed])
    doubts += [f"{_worded(c)}, which counts for nothing here" for c in alarms]
    doubts += _doubts_about_passing(components, controls, smallest_detectable, promised_tv)
    if speculates and (missing := speculation.missing):
        doubts.append(f"{missing}, so speculation was not tested")
    if doubts:
        return concluded("INCONCLUSIVE", doubts)
    directions = ", ".join(smallest_detectable)
    found = f"no alarm; a systematic TV of {promised_tv:g} would have been found ({directions})"
    return concluded("PASS", [found])


def _worded(component: ComponentResult) -> str:
    return f"{component.name}: {component.words}"


def _doubts_about_alarms(controls: Sequence[Control], lost: int) -> list[str]:
    """Return why an alarm may be the instrument's fault."""
    doubts = []
    if lost:
        doubts.append(f"{lost} requests are missing, and that may depend on what they said")
    for control in controls:
        if not control.expected_alarm and control.alarm:
            doubts.append(f"the control '{control.name}' alarmed though nothing was changed")
    return doubts


def _doubts_about_passing(
    components: Sequence[ComponentResult],
    controls: Sequence[Control],
    smallest_detectable: Mapping[str, float | None],
    promised_tv: float,
) -> list[str]:
    """Return why silence may mean nothing."""
    doubts = [_worded(c) for c in components if not c.conclusive]
    if not components:
        doubts.append("no test was made")
    if not any(control.expected_alarm for control in controls):
        doubts.append("no injected fault was tried")
    if all(control.expected_alarm for control in controls):
        doubts.append("no A/A arm was tried")
    doubts += [
        f"the injected fault '{control.name}' was not noticed"
        for control in controls
        if control.expected_alarm and not control.alarm
    ]
    if not smallest_detectable:
        doubts.append("the smallest detectable effects are not known")
    for direction, tv in smallest_detectable.items():
        if tv is None or not tv <= promised_tv:
            reached = "nothing" if tv is None else f"{tv:.3f}"
            doubts.append(f"too few tokens: {direction} finds {reached}; {promised_tv:g} was promised")
    return doubts
