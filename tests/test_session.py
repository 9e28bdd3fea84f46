"""The in-process audit end to end on tiny random models: correct strategies pass, faults fail by name."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
from tiny_models import CONTEXT, build, copied, perturbed

from specbench.audit import session
from specbench.audit.budget import Budget, Control
from specbench.audit.reference import Oracle
from specbench.audit.session import Subject
from specbench.audit.verdicts import AuditRecord
from specbench.engines.local import LocalEngine
from specbench.records import SamplingParams

PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6, 5, 3), (2, 7, 1), (7, 7, 8, 9, 3, 7, 7, 8, 9, 3, 7, 7), (16, 0, 16, 4))
BUDGET = Budget("test", 3000, 0.25)
STRATEGIES = 4
AA = Control("ordinary decoding", expected_alarm=False, alarm=False)


@pytest.fixture(scope="module")
def subject() -> Subject:
    """A random target and a draft that resembles it; sequences only, no chi-squared."""
    target = build("llama", head=0.35)
    engine = LocalEngine(
        copied(target, "sdpa"), eos_ids=(11,), draft=perturbed(target, 0.3), rows=32, width=CONTEXT
    )
    sampling = SamplingParams()
    return Subject(
        engine=engine,
        sampling=sampling,
        prompts=PROMPTS,
        branch_prompts=(),
        budget=BUDGET,
        strategies=STRATEGIES,
        seed=0,
        dtype="float32",
        scales=session.calibrate_regimes(Oracle(engine.runner.model, sampling), PROMPTS),
    )


def fault(name: str) -> Any:
    """Return a fault's alteration."""
    return importlib.import_module(f"specbench.audit.faults.{name}").alter


@pytest.fixture(scope="module")
def control(subject: Subject) -> Control:
    """A large fault that the instrument must notice."""
    return session.false_control(subject, fault("accept_all"), "accept-all")


def audited(subject: Subject, spec: str, control: Control, **options: Any) -> AuditRecord:
    """Audit with both controls."""
    return session.audit(subject, spec, controls=[control, AA], **options)


def test_the_instrument_notices_a_large_fault(control: Control) -> None:
    """The control alarms, as it must."""
    assert control.behaved


@pytest.mark.parametrize(
    "spec",
    [
        "ordinary",
        "ngram:k=3,min=1",
        "draft:k=3",
        "draft:k=3,verify=exact",
        "draft:k=3,verify=block",
        "draft:topk=2,depth=3",
        "draft:topk=2,depth=2,verify=exact",
        "suffix:k=3,nodes=6,factor=4",
        "draft:k=4,policy=confidence",
        "early-exit:layers=2,k=2",
    ],
)
def test_correct_strategies_pass(subject: Subject, control: Control, spec: str) -> None:
    """No alarm, every test conclusive, and every direction within the promise."""
    record = audited(subject, spec, control)
    assert record.verdict == "PASS", (record.reasons, record.detectable)
    assert record.tokens >= BUDGET.tokens
    assert record.contracts_held == record.contracts_tried > 10
    if spec != "ordinary":
        assert set(record.acceptance) == {"own", "self", "good", "bad"}
        assert record.acceptance["self"] is not None
        assert record.acceptance["bad"] is not None
        assert record.acceptance["self"] > 0.95 or "exact" in spec
        assert record.acceptance["bad"] < 0.5


def test_a_lossy_strategy_is_lossy(subject: Subject, control: Control) -> None:
    """What declares that it changes the distribution is not failed for it, and not passed."""
    record = audited(subject, "draft:k=3,verify=typical", control)
    assert record.verdict == "LOSSY"
    assert record.tokens_at_alarm is not None


FAMILIES = {
    "accept_all": ("draft-mix", "lean-to-draft"),
    "residual_from_p": ("residual-from-p", "lean-to-draft"),
    "bonus_from_previous_row": (),
}
"""What fits best for each fault; empty where no family is made for it."""


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_faults_fail(subject: Subject, control: Control, name: str) -> None:
    """Each is found, by what it does to the output; the likeliest family is the right one."""
    record = audited(subject, "draft:k=3", control, alter=fault(name), injected=name)
    assert record.verdict == "FAIL", record.reasons
    assert record.injected == name
    if FAMILIES[name]:
        assert record.alternative.startswith(FAMILIES[name]), record.alternative
    assert record.worst is not None
    seen = session.look_again(subject, "draft:k=3", record.worst, alter=fault(name))
    assert seen is not None
    assert 0 < seen.p < 1
    assert len(seen.before) == record.worst.offset


def test_the_worst_position_is_gone_under_another_seed(subject: Subject, control: Control) -> None:
    """A position that cannot be reproduced is not shown as if it were."""
    record = audited(subject, "draft:k=3", control, alter=fault("accept_all"))
    assert record.worst is not None
    others = [replace(record.worst, seed=seed) for seed in range(20)]
    seen = [session.look_again(subject, "draft:k=3", place, alter=fault("accept_all")) for place in others]
    assert None in seen


def test_too_few_tokens_are_inconclusive(subject: Subject, control: Control) -> None:
    """A promise that the tokens cannot keep is named, direction by direction."""
    small = replace(subject, budget=Budget("tiny", 300, 0.02))
    record = audited(small, "draft:k=3", control)
    assert record.verdict == "INCONCLUSIVE"
    assert any("too few tokens" in reason for reason in record.reasons)


def test_a_missed_control_is_inconclusive(subject: Subject) -> None:
    """An instrument that does not notice a large fault passes nobody."""
    missed = Control("accept-all", expected_alarm=True, alarm=False)
    record = audited(subject, "ngram:k=3,min=1", missed)
    assert record.verdict == "INCONCLUSIVE"
    assert any("not noticed" in reason for reason in record.reasons)


class Never:
    """A drafter that never offers anything."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, context: Any) -> Any:
        """Offer nothing."""
        from specbench.decoding.verification import Proposal

        return Proposal.empty(len(context.tokens))


def test_a_strategy_that_never_drafts_is_inconclusive(subject: Subject, control: Control) -> None:
    """Without a draft nothing of speculation was tested, however right the output is."""
    record = audited(
        subject,
        "draft:k=3",
        control,
        alter=lambda strategy: replace(strategy, drafter=Never(strategy.drafter)),
    )
    assert record.verdict == "INCONCLUSIVE"
    assert any("nothing was drafted" in reason for reason in record.reasons)
