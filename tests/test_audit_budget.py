"""The error budget, and the verdict table of AUDIT.md row by row."""

from __future__ import annotations

import doctest
import math
from typing import Any

import pytest

from specbench.audit import budget
from specbench.audit.budget import (
    BUDGETS,
    RUN_ALPHA,
    SHARES,
    Conclusion,
    Control,
    Setting,
    Speculation,
    alpha_for,
    budget_named,
    combine,
)
from specbench.audit.verdicts import ChiSquaredVerdict, ComponentResult, chi_squared_component
from specbench.errors import UsageError

PROVED = Speculation(drafted=100, accepted=60, rejected=20)
CONTROLS = (Control("A/A", False, False), Control("accept all", True, True))
QUIET = ComponentResult("e-process", False, 1.2, "log e", 6e-4, 60_000, "no evidence")
LOUD = ComponentResult("e-process", True, 12.0, "log e", 6e-4, 900, "like draft mix .3")
OUTSIDE = ComponentResult("support", True, 2.0, "exact", 0.0, 900, "2 tokens outside")
CONTRACT = ComponentResult("contracts", True, 1.0, "exact", 0.0, 90, "stop ids: overrun")


def verdict(*components: ComponentResult, **changes: Any) -> Conclusion:
    """Combine components under circumstances in which silence passes, but for the changes."""
    settings: dict[str, Any] = {
        "alpha": RUN_ALPHA,
        "claims_lossless": True,
        "speculates": True,
        "speculation": PROVED,
        "controls": CONTROLS,
        "smallest_detectable": {"temper": 0.01, "draft mix": 0.02},
        "promised_tv": 0.02,
    }
    return combine(components or (QUIET,), **{**settings, **changes})


def test_docstring_examples_run() -> None:
    """Every example in a docstring prints what it says."""
    assert doctest.testmod(budget).failed == 0


# The budget


@pytest.mark.parametrize("setting", list(SHARES))
@pytest.mark.parametrize("strategies", [1, 7])
def test_all_levels_of_a_run_add_up_to_its_alpha(setting: Setting, strategies: int) -> None:
    """Over tests and strategies together the chance of a false alarm is at most 1e-3."""
    total = math.fsum(
        strategies * alpha_for(test, setting=setting, strategies=strategies) for test in SHARES[setting]
    )
    assert total == pytest.approx(RUN_ALPHA)


def test_the_shares_are_audit_mds() -> None:
    """In process .6, .1 for chi-squared, collisions, acceptance with proposals, and margin with regret."""
    inside, outside = SHARES["in process"], SHARES["server"]
    assert inside["e-process"] == 0.6
    assert inside["chi-squared"] == inside["collisions"] == 0.1
    assert inside["acceptance"] + inside["proposals"] == pytest.approx(0.1)
    assert inside["support"] + inside["greedy regret"] == pytest.approx(0.1)
    assert (outside["paired"], outside["chi-squared"], outside["collisions"]) == (0.6, 0.3, 0.1)
    assert alpha_for("e-process", setting="in process", strategies=3) == pytest.approx(0.2e-3)


def test_budgets_promise_what_audit_md_says() -> None:
    """More tokens promise smaller distances."""
    assert [(b.name, b.tokens, b.promised_tv) for b in BUDGETS.values()] == [
        ("quick", 15_000, 0.04),
        ("standard", 60_000, 0.02),
        ("deep", 150_000, 0.013),
    ]
    assert [b.continuation_tv for b in BUDGETS.values()] == [0.1, 0.05, 0.015]


def test_unknown_names_are_explained() -> None:
    """A mistyped budget suggests the near one; a test that the setting does not have is refused."""
    with pytest.raises(UsageError, match="did you mean 'standard'"):
        budget_named("standart")
    with pytest.raises(ValueError, match="paired"):
        alpha_for("paired", setting="in process", strategies=1)
    with pytest.raises(ValueError, match="1 or more"):
        alpha_for("paired", setting="server", strategies=0)


# The verdicts


def test_pass_names_its_directions() -> None:
    """No alarm, speculation proved, controls behaved, promises kept: PASS, with the directions named."""
    found = verdict()
    assert found.verdict == "PASS"
    assert "temper, draft mix" in found.reasons[0]


def test_an_alarm_fails() -> None:
    """One alarm is enough, whatever else was quiet or inconclusive, and its words come first."""
    found = verdict(QUIET, LOUD, alpha=2e-3, speculation=Speculation(0, 0, 0))
    assert found.verdict == "FAIL"
    assert found.reasons == ("e-process: like draft mix .3",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculation": Speculation(0, 0, 0)}, "nothing was drafted"),
        ({"speculation": Speculation(10, 0, 10)}, "no draft token was accepted"),
        ({"speculation": Speculation(10, 10, 0)}, "no draft token was rejected"),
        ({"controls": ()}, "no injected fault was tried"),
        ({"controls": CONTROLS[:1]}, "no injected fault was tried"),
        ({"controls": CONTROLS[1:]}, "no A/A arm was tried"),
        ({"controls": (CONTROLS[0], Control("accept all", True, False))}, "'accept all' was not noticed"),
        ({"controls": (Control("A/A", False, True), CONTROLS[1])}, "'A/A' alarmed though nothing"),
        ({"smallest_detectable": {}}, "not known"),
        ({"smallest_detectable": {"temper": 0.01, "lean": 0.021}}, "lean finds 0.021; 0.02 was promised"),
        ({"smallest_detectable": {"temper": None}}, "temper finds nothing"),
        ({"smallest_detectable": {"temper": math.nan}}, "too few tokens"),
        ({"lost": 3}, "3 requests are missing"),
    ],
)
def test_whatever_is_missing_is_inconclusive(changes: dict[str, Any], words: str) -> None:
    """Each condition of a PASS, taken away alone, leaves INCONCLUSIVE, and the reason names it."""
    found = verdict(**changes)
    assert found.verdict == "INCONCLUSIVE"
    assert len(found.reasons) >= 1
    assert any(words in reason for reason in found.reasons)


def test_an_inconclusive_component_is_no_pass() -> None:
    """A test that could not have noticed keeps the strategy from passing; so does no test at all."""
    blind = ComponentResult("greedy regret", False, None, "log e", 5e-5, 0, "too noisy", conclusive=False)
    assert verdict(QUIET, blind).verdict == "INCONCLUSIVE"
    assert verdict(QUIET, blind).reasons == ("greedy regret: too noisy",)
    settings = {"speculates": True, "speculation": PROVED, "controls": CONTROLS, "promised_tv": 0.02}
    found = combine((), alpha=1e-3, claims_lossless=True, smallest_detectable={"x": 0.01}, **settings)  # type: ignore[arg-type]
    assert found.verdict == "INCONCLUSIVE"


def test_all_reasons_are_named() -> None:
    """Two conditions missing give two reasons."""
    assert len(verdict(speculation=Speculation(0, 0, 0), smallest_detectable={"x": 0.5}).reasons) == 2


def test_an_alarm_of_an_instrument_that_alarms_at_everything_counts_for_nothing() -> None:
    """With an A/A arm that alarms, or losses that may depend on content, an alarm is INCONCLUSIVE."""
    for changes in ({"controls": (Control("A/A", False, True), CONTROLS[1])}, {"lost": 1}):
        found = verdict(LOUD, **changes)
        assert found.verdict == "INCONCLUSIVE"
        assert any("counts for nothing here" in reason for reason in found.reasons)


def test_what_is_exact_fails_all_the_same() -> None:
    """A token outside the support or a broken contract needs no proof; the contract not even a reference."""
    alarming = (Control("A/A", False, True), CONTROLS[1])
    for exact in (OUTSIDE, CONTRACT):
        assert verdict(exact, lost=2, controls=()).verdict == "FAIL"
    assert verdict(OUTSIDE, controls=alarming).verdict == "INCONCLUSIVE"
    found = verdict(LOUD, OUTSIDE, CONTRACT, controls=alarming)
    assert (found.verdict, found.reasons) == ("FAIL", ("contracts: stop ids: overrun",))


def test_a_missed_injected_fault_does_not_excuse_an_alarm() -> None:
    """A control that was missed says that power lacks, not that alarms are false."""
    assert verdict(LOUD, controls=(CONTROLS[0], Control("x", True, False))).verdict == "FAIL"


def test_lossy_strategies_are_lossy_unless_they_break_a_contract() -> None:
    """A declared change of the law excuses alarms about the law, but not lengths and stops."""
    assert verdict(QUIET, claims_lossless=False).verdict == "LOSSY"
    found = verdict(LOUD, OUTSIDE, claims_lossless=False)
    assert found.verdict == "LOSSY"
    assert len(found.reasons) == 3
    assert verdict(LOUD, CONTRACT, claims_lossless=False).verdict == "FAIL"


def test_ordinary_decoding_needs_no_proof_of_speculation() -> None:
    """What never drafts can pass."""
    assert verdict(speculates=False, speculation=Speculation(0, 0, 0)).verdict == "PASS"


def test_no_more_than_the_strategys_level_may_be_spent() -> None:
    """Components that spend more than the level are a mistake of the caller."""
    with pytest.raises(ValueError, match="add up"):
        verdict(QUIET, QUIET)


@pytest.mark.parametrize(
    ("p_value", "outside", "alarm", "conclusive"),
    [(0.3, 0, False, True), (1e-5, 0, True, True), (0.3, 2, True, True), (None, 0, False, False)],
)
def test_a_stored_chi_squared_check_is_a_component(
    p_value: float | None, outside: int, alarm: bool, conclusive: bool
) -> None:
    """Its p-value decides; a continuation outside the support does so alone, and no p-value is no pass."""
    stored = ChiSquaredVerdict(
        strategy="ngram",
        verdict="PASS",
        reason="every branch prompt has a single continuation",
        lossless_claimed=True,
        dtype="float32",
        temperature=1.0,
        top_k=3,
        prompts=3,
        draws=5000,
        horizon=6,
        statistic=20.0,
        df=18,
        p_value=p_value,
        alpha=1e-4,
        tv_observed=0.01,
        tv_upper=0.03,
        smallest_detectable_tv=0.04,
        out_of_support=outside,
        drafted=900,
        accepted=500,
        rejections=300,
        fully_accepted=20,
        seconds=1.0,
    )
    found = chi_squared_component(stored)
    assert (found.alarm, found.conclusive, found.tokens) == (alarm, conclusive, 30_000)
    assert verdict(found).verdict == ("FAIL" if alarm else "PASS" if conclusive else "INCONCLUSIVE")
