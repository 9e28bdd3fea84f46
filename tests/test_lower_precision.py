"""The audit in bfloat16: a floor that is measured, correct decoders that it spares, faults that it finds."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import CONTEXT, build, copied, perturbed

from specbench.audit import lower_precision, session, tolerant_contracts
from specbench.audit.alternatives import DIRECTIONS
from specbench.audit.budget import SHARES, Budget, Control
from specbench.audit.greedy_regret import FEWEST_TOKENS
from specbench.audit.lower_precision import Instrument
from specbench.audit.numerical_floor import led_along, spread, upcast
from specbench.audit.reference import Oracle
from specbench.audit.session import Subject
from specbench.audit.verdicts import AuditRecord
from specbench.engines.local import LocalEngine
from specbench.records import SamplingParams

PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6, 5, 3), (2, 7, 1), (7, 7, 8, 9, 3, 7, 7, 8, 9, 3, 7, 7), (16, 0, 16, 4))
BUDGET = Budget("test", 1400, 0.35, continuation_tv=0.7)
AA = Control("ordinary decoding", expected_alarm=False, alarm=False)
TESTED = ("ordinary", "draft:k=3")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def subject_in(dtype: str, seed: int = 0) -> Subject:
    """Return a random target, small in its weights so that rounding shows, and a draft that resembles it."""
    kind = getattr(torch, dtype)
    target = build("llama", gain=3.0, head=0.35)
    engine = LocalEngine(
        copied(target, "sdpa").to(kind),
        eos_ids=(11,),
        draft=perturbed(target, 0.3).to(kind),
        rows=32,
        width=CONTEXT,
    )
    sampling = SamplingParams()
    return Subject(
        engine=engine,
        sampling=sampling,
        prompts=PROMPTS,
        branch_prompts=PROMPTS[:2],
        budget=BUDGET,
        strategies=2,
        seed=seed,
        dtype=dtype,
        scales=session.calibrate_regimes(Oracle(engine.runner.model, sampling), PROMPTS),
        chi_sampling=lambda horizon, seed: SamplingParams(max_new_tokens=horizon, seed=seed, top_k=2),
    )


@pytest.fixture(scope="module")
def instrument() -> Instrument:
    """The instrument in bfloat16. Its tolerance is taken for one that rests on enough tokens."""
    made = Instrument(subject_in("bfloat16"), TESTED)
    made.tolerance = replace(made.tolerance, tokens=FEWEST_TOKENS)
    return made


@pytest.fixture(scope="module")
def control(instrument: Instrument) -> Control:
    """A large fault that the paired test must notice."""
    return lower_precision.false_control(instrument, fault("accept_all"), "accept-all")


def by_sequences(
    instrument: Instrument, spec: str, controls: tuple[Control, ...] = (), injected: str | None = None
) -> AuditRecord:
    """Audit without contracts and continuations: by what is sampled and by regret alone."""
    alter = fault(injected) if injected else lambda strategy: strategy
    auditor = lower_precision._Auditor(instrument, spec, alter, lambda _: None)
    auditor.draw()
    return auditor.conclude((), None, controls, injected, {})


def without_texts(instrument: Instrument, budget: Budget, seed: int = 0) -> Instrument:
    """Return the same instrument for another budget and seed, and without whole continuations."""
    other = copy.copy(instrument)
    other.subject = replace(instrument.subject, budget=budget, seed=seed, branch_prompts=())
    return other


def fault(name: str) -> Any:
    """Return a fault's alteration."""
    return importlib.import_module(f"specbench.audit.faults.{name}").alter


def audited(instrument: Instrument, spec: str, control: Control, **options: Any) -> AuditRecord:
    """Audit with both controls."""
    return lower_precision.audit(instrument, spec, controls=[control, AA], **options)


def test_the_floor_is_there_in_bfloat16_and_not_in_float32(instrument: Instrument) -> None:
    """Ordinary decoding differs from the reference by what the precision is worth; sets shift by less."""
    rows = {(row.batch, row.width, row.against): row for row in instrument.floor.rows}
    assert {key[:2] for key in rows} == {(1, 1), (1, 4), (32, 1), (32, 4)}
    for batch, width in ((1, 1), (32, 1), (32, 4)):
        row = rows[batch, width, "reference"]
        assert 1e-4 < row.mean < row.high < 0.1
    assert 0 < rows[32, 4, "batch 32, width 1"].mean < 0.1
    assert 0 < instrument.floor.largest_shift[0] < rows[32, 1, "reference"].mean
    assert instrument.floor.margin >= 2 * instrument.floor.largest_shift[0]
    assert instrument.tolerance.quantile > 0
    assert instrument.reference == "a float32 copy of its weights"

    exact = Instrument(replace(subject_in("float32"), budget=Budget("less", 300, 1.0)), TESTED)
    assert max(row.mean for row in exact.floor.rows) < 1e-5
    assert exact.floor.margin < 1e-5
    assert exact.tolerance.value == 1e-3


def test_led_along_is_the_plain_forward(instrument: Instrument) -> None:
    """In float32, rows of a ragged batch at any width are those of plain forwards."""
    subject = subject_in("float32")
    texts = [(PROMPTS[0], (5, 6, 7, 8, 9, 10)), (PROMPTS[1], (1, 2, 3, 4, 5, 6))]
    for width in (1, 3, 4):
        found = led_along(subject.engine.runner, texts, width)
        for place, (prompt, output) in enumerate(texts):
            expected = next(subject.oracle().rows(prompt, [output]))[1][1:]
            torch.testing.assert_close(found[place], expected, rtol=1e-4, atol=1e-4)
    assert all(value < 1e-4 for value in spread(subject.engine.runner, subject.oracle(), texts, 3))


def test_the_reference_is_a_copy_only_where_it_must_be() -> None:
    """A float32 model is its own reference; a bfloat16 one keeps its weights."""
    exact, rounded = subject_in("float32").engine.runner.model, subject_in("bfloat16").engine.runner.model
    assert upcast(exact)[0] is exact
    copied_model, _ = upcast(rounded)
    assert copied_model.dtype == torch.float32
    assert rounded.dtype == torch.bfloat16
    for one, other in zip(copied_model.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(one, other.float())


def test_the_instrument_notices_a_large_fault(control: Control) -> None:
    """The control alarms, as it must."""
    assert control.behaved


@pytest.mark.parametrize("spec", ["ordinary", "draft:k=3", "draft:topk=2,depth=3"])
def test_correct_strategies_pass(instrument: Instrument, control: Control, spec: str) -> None:
    """No alarm, every test conclusive, and every direction within the promise."""
    record = audited(instrument, spec, control)
    assert record.verdict == "PASS", (record.reasons, record.detectable)
    assert record.tokens >= BUDGET.tokens
    assert record.contracts_held == record.contracts_tried > 6
    assert set(record.detectable) == {direction.name for direction in DIRECTIONS}
    assert record.floor is not None
    assert record.floor.continuation is not None
    assert record.chi_squared is not None
    assert record.chi_squared.top_k == 0
    # No test spends another's share.
    assert record.alpha == pytest.approx(1e-3 / instrument.subject.strategies)
    assert {c.name for c in record.components if c.alpha} == set(SHARES["lower precision"])


@pytest.mark.parametrize("seed", [1, 2])
def test_correct_speculation_does_not_alarm_under_other_seeds(instrument: Instrument, seed: int) -> None:
    """No test alarms, whatever is drawn."""
    other = without_texts(instrument, BUDGET, seed=seed)
    record = by_sequences(other, "draft:k=3")
    assert not any(component.alarm for component in record.components), record.components
    assert record.tokens >= BUDGET.tokens


@pytest.mark.parametrize("name", ["residual_from_p", "bonus_from_previous_row"])
def test_faults_fail(instrument: Instrument, control: Control, name: str) -> None:
    """Each is found by what it does to the output, and its size is shown."""
    wide = without_texts(instrument, Budget("test", 4000, 1.0))
    record = by_sequences(wide, "draft:k=3", (control, AA), name)
    assert record.verdict == "FAIL", record.reasons
    assert record.injected == name
    assert record.tokens_at_alarm is not None
    assert record.log_e >= record.bar
    assert record.effect is not None
    assert record.effect.tv > instrument.floor.margin


def test_too_few_tokens_are_inconclusive(instrument: Instrument, control: Control) -> None:
    """A promise that the tokens cannot keep is named; a tolerance from few tokens too."""
    other = without_texts(instrument, Budget("tiny", 300, 0.02))
    other.tolerance = replace(instrument.tolerance, tokens=300)
    record = by_sequences(other, "draft:k=3", (control, AA))
    assert record.verdict == "INCONCLUSIVE"
    assert any("too few tokens" in reason for reason in record.reasons)
    assert any("tolerance rests on 300 tokens" in reason for reason in record.reasons)


def test_truncation_is_taken_off_and_named() -> None:
    """What is cut off cannot be judged in this precision: nothing is, and the record says so."""
    asked = SamplingParams(top_k=3, min_p=0.1, temperature=0.8)
    assert lower_precision.left_out(asked) == ("top_k", "min_p")
    assert lower_precision.untruncated(asked) == SamplingParams(temperature=0.8)
    small = replace(
        subject_in("bfloat16"), sampling=asked, branch_prompts=(), budget=Budget("tiny", 300, 1.0)
    )
    record = by_sequences(Instrument(small, TESTED), "draft:k=3")
    words = next(c.words for c in record.components if c.name == "truncation")
    assert words.startswith("top_k, min_p left out")
    assert not any(component.alarm for component in record.components)


BROKEN = {
    "text_after_eos": "EOS in an accepted run",
    "eos_missed_in_run": "EOS in an accepted run",
    "eos_called_length": "finish reasons",
    "stop_ids_missed_in_run": "stop ids",
    "budget_overrun_by_run": "length limits",
    "seed_ignored": "seeds",
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_broken_contracts_are_found_without_comparing_numbers(instrument: Instrument, name: str) -> None:
    """What must hold within an output is checked in full."""
    decoder = session.Auditor(instrument.subject, "draft:k=3", fault(name), lambda _: None)
    broken = [r.name for r in tolerant_contracts.check(decoder.contract_subject()) if r.held is False]
    assert BROKEN[name] in broken


def test_every_contract_is_kept_loosened_or_left_out() -> None:
    """Nothing is forgotten when a contract is added."""
    from specbench.audit.contracts import CONTRACTS

    listed = (*tolerant_contracts.UNCHANGED, *tolerant_contracts.TOLERANT, *tolerant_contracts.LEFT_OUT)
    assert sorted(listed) == sorted(CONTRACTS)
