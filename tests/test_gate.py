"""The gate: what passes, what fails, what cannot be compared, and how often it is wrong.

Seeds and sizes were fixed before looking; bounds on error rates are binomial.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats as scipy_stats
from tiny_models import CONTEXT, Served, build, collect, copied, greedy, perturbed, shared

from specbench.audit.chi_squared import judge
from specbench.audit.faults.accepts_too_often import AcceptsTooOften
from specbench.audit.faults.draft_shifted import alter as shift
from specbench.audit.reference import Oracle
from specbench.bench.matrix import Encoded, Unit, schedule
from specbench.bench.store import RunStore
from specbench.cli import main
from specbench.decoding.verification import RejectionSampling
from specbench.engines.local import LocalEngine
from specbench.engines.simulated import Options, SimulatedEngine
from specbench.errors import CheckFailed, NotMeasured, UsageError
from specbench.gate import compare, snapshot
from specbench.gate.compare import ALPHA, MIN_PROMPTS, PROMISE, Gate, gate, headline
from specbench.gate.paired import POWER, compare_ratios
from specbench.gate.snapshot import COLUMNS, Audited, CellCounts, Snapshot, count_cell
from specbench.metrics.acceptance import RoundCounts
from specbench.records import CellKey, CellRecords, Request, SamplingParams, Schedule, Serving
from specbench.workloads import Load
from tests.toy import Toy, decode

Captured = pytest.CaptureFixture[str]

STRATEGY = "ngram:k=4"
CONFIG: dict[str, Any] = {
    "models": {"target": {"name": "tiny", "fingerprint": "a" * 64, "dtype": "float32"}, "draft": None},
    "engine": "local",
    "seed": 0,
    "workloads": {"chat": {"digest": "d" * 64, "prompts": 40, "max_new_tokens": 48}},
}


# Snapshots made by hand


def counts(rounds: int, accepted: int, drafted: int | None = None) -> RoundCounts:
    """Return the counts of a prompt whose rounds drafted four tokens each and ended in a rejection."""
    offered = 4 * rounds if drafted is None else drafted
    drafts = rounds if offered else 0
    return RoundCounts(rounds, drafts, offered, offered, accepted, accepted + drafts, accepted + rounds)


def cell(load: str = "c=1", strategy: str = STRATEGY, temperature: float = 1.0) -> CellKey:
    return CellKey("chat", temperature, load, strategy)


def taken(
    cells: Mapping[CellKey, Sequence[RoundCounts]],
    audits: Sequence[Audited] = (),
    **changes: Any,
) -> Snapshot:
    """Return the snapshot of a complete run; prompts are called p000, p001 and so on."""
    held = {
        key: CellCounts(len(rows), 0, {f"p{i:03}": row for i, row in enumerate(rows)})
        for key, rows in cells.items()
    }
    made = Snapshot("by-hand", "2026-01-01", "complete", CONFIG, {}, tuple(audits), held)
    return dataclasses.replace(made, **changes)


def audited(verdict: str, strategy: str = STRATEGY, p: float | None = 0.4) -> Audited:
    reason = f"p = {p}" if p else "no reason"
    return Audited(strategy, verdict, reason, p, 2e-4, "float32", 10_000, 0.05)  # type: ignore[arg-type]


PLAIN = [counts(10 + i % 3, 20 + i % 5) for i in range(24)]
BASELINE = taken({cell(): PLAIN}, [audited("PASS")])


# Runs played by the simulated engine, without a run folder


def played(alpha: float, seed: int, prompts: int = 40) -> CellCounts:
    engine = SimulatedEngine(Options(alpha=alpha))
    engine.open(STRATEGY)
    encoded = tuple(Encoded(f"p{i:03}", (1, 2, 3), 48) for i in range(prompts))
    unit = Unit("chat", 1.0, Load.parse("c=1"), 0, 0, encoded)
    served = collect(engine.serve(schedule(unit, seed=seed, rate=None, again=False)))
    return count_cell(CellRecords(cell(), (serving(served),)))


def serving(served: Served, key: CellKey | None = None, unit: int = 0) -> Serving:
    return Serving(key or cell(), 0, unit, served.steps, served.rounds, tuple(served.records.values()), 1.0)


def simulated(alpha: float, seed: int, prompts: int = 40) -> Snapshot:
    return dataclasses.replace(BASELINE, audits=(), cells={cell(): played(alpha, seed, prompts)})


# ---- What passes and what fails -----------------------------------------------------------------------


def test_a_rerun_has_equal_counts_and_passes() -> None:
    """The same decoder with the same seeds gives the same counts, and the gate says so."""
    result = gate(simulated(0.8, 0), simulated(0.8, 0))
    assert result.exit_code == 0
    assert {c.outcome for c in result.comparisons} == {"same"}
    assert "the counts of all 1 cells that draft are the baseline's" in result.conclusion


def test_other_seeds_pass() -> None:
    """At fifty other seeds the same acceptance never fails, and every pass could have seen the promise."""
    baseline = simulated(0.8, 0)
    results = [gate(baseline, simulated(0.8, seed)) for seed in range(1, 51)]
    assert [result.exit_code for result in results] == [0] * 50
    found = [headline(result.comparisons)[0] for result in results]
    assert all(c.smallest_detectable is not None and c.smallest_detectable <= PROMISE for c in found)


@pytest.mark.parametrize(("alpha", "outcome"), [(0.7, "fell"), (0.85, "rose")])
def test_a_change_of_acceptance_fails(alpha: float, outcome: str) -> None:
    """With the same seeds, acceptance .8 to .7 is a fall, and to .85 a rise, which fails just as well."""
    result = gate(simulated(0.8, 0, 80), simulated(alpha, 0, 80))
    assert result.exit_code == 1
    assert {c.outcome for c in result.comparisons} == {outcome}
    assert ("changed, rose" if outcome == "rose" else "fell by") in result.conclusion


def test_a_fall_is_found_among_other_random_numbers() -> None:
    """Acceptance .8 to .7 fails at each of twenty other seeds, over 160 prompts."""
    baseline = simulated(0.8, 0, 160)
    assert all(gate(baseline, simulated(0.7, seed, 160)).exit_code == 1 for seed in range(1, 21))


def test_a_strategy_is_judged_over_all_its_cells() -> None:
    """Five cells of six prompts, none of which could fail alone, fail together."""
    rng = np.random.default_rng(1)
    keys = [cell(f"c={n}") for n in range(1, 6)]
    noise = rng.integers(-4, 5, (2, 5, 6))

    def side(mean: int, which: int) -> dict[CellKey, list[RoundCounts]]:
        return {key: [counts(12, mean + int(x)) for x in noise[which, i]] for i, key in enumerate(keys)}

    # Cells of one workload share prompts; these must not, or there would be six prompts only.
    def apart(cells: dict[CellKey, list[RoundCounts]]) -> Snapshot:
        renamed = {
            key: CellCounts(6, 0, {f"{key.load}-{i}": row for i, row in enumerate(rows)})
            for key, rows in cells.items()
        }
        return dataclasses.replace(BASELINE, audits=(), cells=renamed)

    result = gate(apart(side(30, 0)), apart(side(25, 1)))
    assert result.exit_code == 1
    assert {c.outcome for c in result.comparisons if c.cell is not None} <= {"imprecise"}
    assert {c.outcome for c in result.comparisons if c.cell is None} == {"fell"}


def test_prompts_are_added_up_over_the_cells_of_a_strategy() -> None:
    """The same prompts under two loads are no more prompts: copies of noise are not evidence."""
    before = {cell("c=1"): PLAIN, cell("c=8"): PLAIN}
    after = {key: [counts(10 + i % 3, 20 + i % 4) for i in range(24)] for key in before}
    once = gate(taken({cell("c=1"): PLAIN}), taken({cell("c=1"): after[cell("c=1")]}))
    twice = gate(taken(before), taken(after))
    total = headline(twice.comparisons)[0]
    assert total.cell is None
    assert total.prompts == 24
    assert total.p_value == pytest.approx(headline(once.comparisons)[0].p_value)


def test_a_small_significant_change_is_reported_and_passes() -> None:
    """One accepted token less in every prompt is certain, below 2 %, and no regression."""
    before = [counts(100, 200 + i) for i in range(24)]
    after = [counts(100, 199 + i) for i in range(24)]
    result = gate(taken({cell(): before}), taken({cell(): after}))
    found = headline(result.comparisons)[0]
    assert found.p_value is not None
    assert found.p_value < found.level
    assert (found.outcome, result.exit_code) == ("ok", 0)
    assert found.change == pytest.approx(-100 / 31150, rel=0.1)


def test_everything_lost_at_once_fails() -> None:
    """With a change that is the same in every prompt there is no noise, and the change fails."""
    result = gate(taken({cell(): [counts(12, 36)] * 8}), taken({cell(): [counts(40, 8)] * 8}))
    assert result.exit_code == 1


def test_ordinary_decoding_is_not_compared() -> None:
    """A cell that drafts on neither side has one token per step by definition."""
    cells = {cell(): PLAIN, cell(strategy="ordinary"): [counts(30, 0, drafted=0)] * 24}
    other = {cell(): PLAIN, cell(strategy="ordinary"): [counts(31, 0, drafted=0)] * 24}
    result = gate(taken(cells), taken(other))
    assert result.exit_code == 0
    assert {c.strategy for c in result.comparisons} == {STRATEGY}


# ---- Audits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("PASS", "PASS", 0),
        ("PASS", "FAIL", 1),
        ("INCONCLUSIVE", "FAIL", 1),
        ("LOSSY", "FAIL", 1),
        (None, "FAIL", 1),
        ("PASS", "LOSSY", 1),
        ("LOSSY", "LOSSY", 0),
        ("LOSSY", "PASS", 0),
        ("PASS", "INCONCLUSIVE", 3),
        ("PASS", None, 3),
        ("LOSSY", "INCONCLUSIVE", 3),
        ("INCONCLUSIVE", "INCONCLUSIVE", 0),
        ("INCONCLUSIVE", "PASS", 0),
        (None, "PASS", 0),
        (None, None, 0),
    ],
)
def test_audits(before: str | None, after: str | None, code: int) -> None:
    """FAIL always fails; what was known and is not known any more cannot be compared."""
    sides = [
        taken({cell(): PLAIN}, [] if verdict is None else [audited(verdict)]) for verdict in (before, after)
    ]
    assert gate(*sides).exit_code == code


def test_a_failed_audit_fails_whatever_else_is_wrong() -> None:
    """Not even another model, or an unfinished run, hides a FAIL."""
    run = taken({cell(): PLAIN}, [audited("FAIL", p=1e-9)], status="interrupted")
    result = gate(BASELINE, run)
    assert result.exit_code == 1
    assert "the audit failed ngram:k=4 (p = 1e-09)" in result.conclusion
    assert result.problems


# ---- What cannot be compared --------------------------------------------------------------------------


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the configuration with one entry changed."""
    config: dict[str, Any] = json.loads(json.dumps(CONFIG))
    *parents, last = path.split("/")
    place = config
    for name in parents:
        place = place[name]
    place[last] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("models/target/fingerprint", "b" * 64, "another model"),
        ("models/target/dtype", "bfloat16", "another dtype: tiny bfloat16"),
        ("models/target", None, "target model tiny is in the baseline only"),
        ("models/draft", {"name": "small", "fingerprint": "c"}, "draft model small is in the run only"),
        ("engine", "simulated", "engine is simulated"),
        ("workloads/chat/digest", "e" * 64, "digest"),
        ("workloads/chat/prompts", 6, "prompts 6"),
        ("workloads/chat/max_new_tokens", 16, "max_new_tokens 16"),
        ("workloads/chat/ignore_eos", True, "ignore_eos"),
        ("workloads", {}, "workload 'chat' was not run"),
    ],
)
def test_other_questions_are_not_compared(path: str, value: Any, words: str) -> None:
    """Another model, dtype, engine, workload or limit gives counts of another question."""
    run = dataclasses.replace(BASELINE, config=changed(path, value))
    result = gate(BASELINE, run)
    assert result.exit_code == 3
    assert words in result.conclusion
    assert not result.comparisons


@pytest.mark.parametrize("path", ["seed", "repeats", "rows", "engine_options"])
def test_what_may_differ_is_noted(path: str) -> None:
    """The seed, repeats, the batch and an engine's options may differ, and are named."""
    result = gate(BASELINE, dataclasses.replace(BASELINE, config=changed(path, 7)))
    assert result.exit_code == 0
    assert any(f"set differently: {path} 7" in note for note in result.notes)


def broken_runs() -> dict[str, Snapshot]:
    failed = {cell(): CellCounts(24, 2, BASELINE.cells[cell()].prompts)}
    return {
        "by-hand is interrupted": dataclasses.replace(BASELINE, status="interrupted"),
        "holds no cell": dataclasses.replace(BASELINE, cells={}),
        "cell 'chat T=1 c=1 ngram:k=4' of the baseline": taken({cell("c=8"): PLAIN}, [audited("PASS")]),
        "2 of 24 requests failed": dataclasses.replace(BASELINE, cells=failed),
        "has other prompts": taken({cell(): PLAIN[:-1]}, [audited("PASS")]),
        "drafted nothing": taken({cell(): [counts(11, 0, drafted=0)] * 24}, [audited("PASS")]),
    }


@pytest.mark.parametrize("words", [name for name in broken_runs() if name != "drafted nothing"])
def test_a_run_with_gaps_is_not_compared(words: str) -> None:
    """An unfinished run, a missing cell or prompt and failed requests give exit code 3."""
    result = gate(BASELINE, broken_runs()[words])
    assert result.exit_code == 3
    assert words in result.conclusion


def test_a_run_that_drafts_nothing_never_passes() -> None:
    """Where drafting had helped that is a fall; where it had not, it cannot be compared."""
    silent = broken_runs()["drafted nothing"]
    assert gate(BASELINE, silent).exit_code == 1
    useless = taken({cell(): [counts(11, 0)] * 24}, [audited("PASS")])
    result = gate(useless, silent)
    assert result.exit_code == 3
    assert "drafted nothing" in result.conclusion


def test_other_cells_of_the_run_are_left_alone() -> None:
    """A cell that the baseline lacks is named and not judged."""
    result = gate(BASELINE, taken({cell(): PLAIN, cell("c=8"): PLAIN}, [audited("PASS")]))
    assert result.exit_code == 0
    assert any("not in the baseline" in note for note in result.notes)


def test_too_few_prompts_never_pass_unless_equal() -> None:
    """With five prompts equal counts pass, and differing ones are not compared."""
    few = PLAIN[: MIN_PROMPTS - 1]
    assert gate(taken({cell(): few}), taken({cell(): few})).exit_code == 0
    other = [*few[:-1], counts(11, 19)]
    result = gate(taken({cell(): few}), taken({cell(): other}))
    assert result.exit_code == 3
    assert "too few" in result.conclusion


def test_noise_that_hides_the_promise_is_no_pass() -> None:
    """Where a change of 30 % could have been missed, the gate does not pass."""
    rng = np.random.default_rng(3)
    sides = [taken({cell(): [counts(6, int(x)) for x in rng.integers(0, 24, 8)]}) for _ in range(2)]
    result = gate(*sides)
    assert headline(result.comparisons)[0].outcome == "imprecise"
    assert result.exit_code == 3


# ---- How often it is wrong ----------------------------------------------------------------------------

PROMPTS, ROUNDS, K = 12, 14, 4


def tables(
    rng: np.random.Generator, num: int, laws: NDArray[np.float64], spread: float = 0.08
) -> NDArray[np.int64]:
    """Draw accepted tokens [num, cells, prompts]: each request has its own acceptance around its prompt's.

    Rounds of a request are therefore correlated. `laws` [cells, prompts] is each prompt's acceptance.
    """
    alphas = np.clip(laws + spread * rng.standard_normal((num, *laws.shape)), 0.01, 0.99)
    tosses = rng.random((num, *laws.shape, ROUNDS, K)) < alphas[..., None, None]
    accepted: NDArray[np.int64] = np.cumprod(tosses, axis=-1).sum((-1, -2))
    return accepted


def as_snapshot(accepted: NDArray[np.int64]) -> Snapshot:
    """Turn drawn counts [cells, prompts] into a snapshot; cells are loads of different prompts."""
    cells = {
        cell(f"c={i + 1}"): CellCounts(
            len(row), 0, {f"{i}-{j:02}": counts(ROUNDS, int(value)) for j, value in enumerate(row)}
        )
        for i, row in enumerate(accepted)
    }
    return dataclasses.replace(BASELINE, audits=(), cells=cells)


def alarmed(result: Gate) -> bool:
    return any(c.outcome in ("fell", "rose") for c in result.comparisons)


def test_false_alarms_are_as_rare_as_promised() -> None:
    """Of 2,000 gates over 4 cells of unlike prompts no more alarm than a rate of 1e-3 allows, or of .05."""
    rng = np.random.default_rng(20)
    laws = rng.uniform(0.3, 0.95, (4, PROMPTS))
    before, after = tables(rng, 2000, laws), tables(rng, 2000, laws)
    alarms = {ALPHA: 0, 0.05: 0}
    for one, other in zip(before, after, strict=True):
        sides = as_snapshot(one), as_snapshot(other)
        for alpha in alarms:
            alarms[alpha] += alarmed(gate(*sides, alpha=alpha))
    for alpha, seen in alarms.items():
        assert seen <= scipy_stats.binom.ppf(0.999, 2000, alpha), alpha


@pytest.mark.parametrize("prompts", [MIN_PROMPTS, 10, 40])
def test_the_test_keeps_its_level(prompts: int) -> None:
    """On counts of six, ten and forty prompts, p falls below .05, .01 and .001 no more often than it may."""
    rng = np.random.default_rng(prompts)
    laws = rng.uniform(0.3, 0.95, (1, prompts))
    num = 4000
    before, after = tables(rng, num, laws)[:, 0], tables(rng, num, laws)[:, 0]
    values = np.array(
        [
            compare_ratios([(int(a) + ROUNDS, ROUNDS) for a in x], [(int(a) + ROUNDS, ROUNDS) for a in y])
            .p_value
            for x, y in zip(before, after, strict=True)
        ]
    )  # fmt: skip
    for level in (0.05, 0.01, 0.001):
        assert (values <= level).sum() <= scipy_stats.binom.ppf(0.999, num, level), level
    assert (values <= 0.05).mean() > 0.03


def test_sparse_differences_raise_no_alarm() -> None:
    """Where few prompts differ at all, as when near-ties flip at temperature 0, 2,000 gates do not alarm."""
    rng = np.random.default_rng(5)
    alarms = 0
    for _ in range(2000):
        flipped = rng.random(24) < 0.15
        shift = np.where(flipped, rng.choice([-9, -4, 4, 9], 24), 0)
        after = [counts(10 + i % 3, 20 + i % 5 + int(s)) for i, s in enumerate(shift)]
        alarms += alarmed(gate(taken({cell(): PLAIN}), taken({cell(): after})))
    assert alarms <= scipy_stats.binom.ppf(0.999, 2000, ALPHA)


def test_the_smallest_detectable_change_is_detected() -> None:
    """A change of the size that the gate prints is found almost as often as it claims.

    The printed figure is an estimate, so .95 is asked for where it says .99.
    """
    rng = np.random.default_rng(8)
    laws = rng.uniform(0.5, 0.9, (1, 40))
    before = tables(rng, 300, laws)
    null = [headline(gate(as_snapshot(a), as_snapshot(b)).comparisons)[0] for a, b in
            zip(before, tables(rng, 300, laws), strict=True)]  # fmt: skip
    printed = float(np.mean([c.smallest_detectable for c in null if c.smallest_detectable]))
    assert 0.05 < printed < 0.3
    grid = np.linspace(0.01, 0.99, 2000)
    length = tables(np.random.default_rng(9), 300, np.array([grid])).mean(0)[0] / ROUNDS + 1
    smooth = np.polyval(np.polyfit(grid, length, 6), grid)
    wanted = np.interp(laws, grid, smooth) * (1 - printed)
    shifted = np.interp(wanted, smooth, grid)
    found = [
        headline(gate(as_snapshot(a), as_snapshot(b)).comparisons)[0].outcome == "fell"
        for a, b in zip(before, tables(rng, 300, shifted), strict=True)
    ]
    assert np.mean(found) >= POWER - 0.04
    half = np.interp(np.interp(laws, grid, smooth) * (1 - printed / 3), smooth, grid)
    seldom = [
        headline(gate(as_snapshot(a), as_snapshot(b)).comparisons)[0].outcome == "fell"
        for a, b in zip(before[:100], tables(rng, 100, half), strict=True)
    ]
    assert np.mean(seldom) < 0.5


def test_swapping_the_sides_changes_nothing_but_the_sign() -> None:
    """The p-value and the error are those of the swapped sides."""
    rng = np.random.default_rng(2)
    before, after = ([(int(a), int(b)) for a, b in rng.integers(5, 40, (15, 2))] for _ in range(2))
    one, other = compare_ratios(before, after), compare_ratios(after, before)
    assert one.p_value == pytest.approx(other.p_value)
    assert one.error == pytest.approx(other.error)
    assert (one.before, one.after) == (other.after, other.before)


def test_the_statistic_is_the_change_over_its_error() -> None:
    """The t statistic of the differences is the change of the pooled ratio over the reported error."""
    rng = np.random.default_rng(4)
    before, after = ([(int(a), int(b)) for a, b in rng.integers(5, 40, (15, 2))] for _ in range(2))
    found = compare_ratios(before, after)
    assert found.before is not None
    assert found.after is not None
    assert found.error is not None
    statistic = (found.after - found.before) / found.error
    assert found.p_value == pytest.approx(2 * scipy_stats.t.sf(abs(statistic), 14))


# ---- The file -----------------------------------------------------------------------------------------


def test_a_baseline_survives_its_file(tmp_path: Path) -> None:
    """Reading gives back what was written, and writing that again gives the same bytes."""
    original = taken({cell(): PLAIN, cell("c=8"): PLAIN}, [audited("PASS"), audited("LOSSY", "x", None)])
    text = snapshot.to_json(original)
    path = tmp_path / "b.json"
    path.write_text(text, encoding="utf-8")
    assert snapshot.read(path) == original
    assert snapshot.to_json(snapshot.read(path)) == text


def test_a_baseline_tells_no_times_and_no_paths() -> None:
    """Neither seconds nor the folders of models are kept."""
    config = changed("models/target/name", "/home/somebody/models/tiny")
    text = snapshot.to_json(taken({cell(): PLAIN}, config=config, environment={"command": "x --output /y"}))
    assert '"name": "tiny"' in text
    assert "/home" not in text
    assert "/y" not in text
    assert not [key for key in json.loads(text)["cells"][0] if key.endswith("_s")]


def test_requests_of_a_prompt_are_added_up() -> None:
    """Repeats and other servings of a prompt are summed; request numbers repeat between servings."""
    once = played(0.8, 0, prompts=5)
    engine = SimulatedEngine(Options(alpha=0.8))
    engine.open(STRATEGY)
    encoded = tuple(Encoded(f"p{i:03}", (1, 2, 3), 48) for i in range(5))
    unit = Unit("chat", 1.0, Load.parse("c=1"), 0, 0, encoded)
    served = collect(engine.serve(schedule(unit, seed=0, rate=None, again=False)))
    twice = count_cell(CellRecords(cell(), (serving(served), serving(served, unit=1))))
    assert twice.requests == 10
    for prompt, row in twice.prompts.items():
        assert [getattr(row, name) for name in COLUMNS] == [
            2 * getattr(once.prompts[prompt], name) for name in COLUMNS
        ]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"status": "running"}, NotMeasured),
        ({"cells": {}}, NotMeasured),
        ({"config": {**CONFIG, "inject": "accept-all"}}, NotMeasured),
        ({"cells": {cell(): CellCounts(3, 1, {})}}, NotMeasured),
        ({"audits": (audited("FAIL"),)}, CheckFailed),
    ],
)
def test_an_unsound_run_is_no_baseline(change: dict[str, Any], error: type[Exception]) -> None:
    """An unfinished run, one with failures, with a fault or with a failed audit is refused."""
    snapshot.require_sound(BASELINE)
    with pytest.raises(error):
        snapshot.require_sound(dataclasses.replace(BASELINE, **change))


# ---- The commands -------------------------------------------------------------------------------------

RUN = (
    "run", "--strategy", STRATEGY, "--workload", "predictable", "--limit", "40", "--temperature", "1",
    "--max-new-tokens", "48", "--output", "results",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make three runs and a baseline of the first, once."""
    folder = tmp_path_factory.mktemp("gate")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, options in {
            "base": ["--engine", "simulated:alpha=.8"],
            "other-seed": ["--engine", "simulated:alpha=.8", "--seed", "5"],
            "worse": ["--engine", "simulated:alpha=.6"],
            "shorter": ["--engine", "simulated:alpha=.8", "--limit", "8"],
        }.items():
            assert main([*RUN, *options, "--run-id", name]) == 0
        assert main(["baseline", "results/base", "--output", "baselines/b.json"]) == 0
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> Path:
    """Stand in a copy of the folder with the runs."""
    copy = Path(shutil.copytree(made, tmp_path / "here"))
    monkeypatch.chdir(copy)
    capsys.readouterr()
    return copy


@pytest.mark.parametrize(("run", "code"), [("base", 0), ("other-seed", 0), ("worse", 1), ("shorter", 3)])
def test_exit_codes(here: Path, run: str, code: int, capsys: Captured) -> None:
    """The command returns what the gate decided; the last line says it in words."""
    assert main(["gate", f"results/{run}", "--baseline", "baselines/b.json"]) == code
    captured = capsys.readouterr()
    text = " ".join(captured.out.split("\n\n")[-1].split())
    assert text.startswith({0: "PASS:", 1: "FAIL:", 3: "NOT COMPARED:"}[code])
    assert captured.err.startswith("error: not compared: ") == (code == 3)
    assert len(captured.err.splitlines()) == (code == 3)


def test_the_table_says_what_was_compared(here: Path, capsys: Captured) -> None:
    """Baseline, run, change, p, detectable change and verdict stand in one row per cell."""
    assert main(["gate", "results/worse", "--baseline", "baselines/b.json", "--width", "200"]) == 1
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.startswith(STRATEGY))
    assert row.count("FAIL: fell") == 2
    assert "predictable T=1 c=1" in row
    assert "Times are not compared." in text


def test_json_is_one_document(here: Path, capsys: Captured) -> None:
    """`--json` prints the whole result, the verdict and the exit code."""
    assert main(["gate", "results/worse", "--baseline", "baselines/b.json", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 1
    assert [c["outcome"] for c in document["comparisons"]] == ["fell", "fell"]
    assert "ngram:k=4: tokens per target step fell by" in document["conclusion"]


def test_markdown_is_for_pull_requests(here: Path, capsys: Captured) -> None:
    """`--format markdown` prints the conclusion first, then tables."""
    assert main(["gate", "results/base", "--baseline", "baselines/b.json", "--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("### specbench gate: run base against baseline base")
    assert lines[2].startswith("**PASS:")
    assert any(line.startswith("| :-- |") for line in lines)


def test_the_stored_verdicts_count(here: Path) -> None:
    """FAIL in run.json gives 1, INCONCLUSIVE after PASS gives 3, and the p-value is in the baseline."""
    golden = json.loads((Path(__file__).parent / "golden" / "run" / "run.json").read_text())
    verdict = {**golden["audits"][0], "strategy": STRATEGY, "injected": None}
    store = RunStore.open(here / "results" / "base")
    store.update(audits=[{**verdict, "verdict": "PASS", "p_value": 0.25}])
    assert main(["baseline", "results/base", "--output", "audited.json"]) == 0
    assert json.loads(Path("audited.json").read_text())["audits"][0]["p_value"] == 0.25
    for word, code in (("PASS", 0), ("FAIL", 1), ("INCONCLUSIVE", 3)):
        store.update(audits=[{**verdict, "verdict": word}])
        assert main(["gate", "results/base", "--baseline", "audited.json"]) == code
    store.update(audits=[{**verdict, "verdict": "FAIL"}])
    assert main(["baseline", "results/base"]) == 1
    store.update(audits=[], status="interrupted")
    assert main(["gate", "results/base", "--baseline", "audited.json"]) == 3
    assert main(["baseline", "results/base"]) == 3


def test_a_run_without_its_records_is_not_compared(here: Path, capsys: Captured) -> None:
    """run.json alone holds pooled counts without their sampling error."""
    for path in (here / "results" / "base").glob("*.parquet"):
        path.unlink()
    assert main(["gate", "results/base", "--baseline", "baselines/b.json"]) == 3
    assert "no records" in capsys.readouterr().err


def test_a_baseline_is_small_and_the_same_each_time(here: Path) -> None:
    """Two baselines of one run are equal, readable, and well below 200 KB."""
    assert main(["baseline", "results/base"]) == 0
    first = Path("baselines/base.json").read_bytes()
    assert first == Path("baselines/b.json").read_bytes()
    assert len(first) < 50_000
    document = json.loads(first)
    assert document["prompt_columns"] == list(COLUMNS)
    assert len(document["cells"][-1]["prompts"]) == 40


def damaged(text: str) -> dict[str, str]:
    """Return ways to spoil a baseline file."""
    document = json.loads(text)
    drafting = document["cells"][-1]
    other = {**drafting, "counts": {**drafting["counts"], "accepted": 1}}
    negative = {**drafting, "prompts": {**drafting["prompts"], "x": [-1] * len(COLUMNS)}}
    return {
        "not readable JSON": text[: len(text) // 2],
        "is no baseline": "[]",
        "no baseline of": json.dumps({**document, "kind": "other"}),
        "baseline of specbench": json.dumps({k: v for k, v in document.items() if k != "schema_version"}),
        "schema version 99": json.dumps({**document, "schema_version": 99}),
        "'cells' is missing": json.dumps({k: v for k, v in document.items() if k != "cells"}),
        "not the sums": json.dumps({**document, "cells": [other]}),
        "expected a count": json.dumps({**document, "cells": [negative]}),
        "is damaged": json.dumps({**document, "cells": [7]}),
    }


@pytest.mark.parametrize("words", damaged('{"cells": [{"counts": {}, "prompts": {}}]}'))
def test_a_bad_baseline_is_a_usage_error(here: Path, words: str, capsys: Captured) -> None:
    """A corrupt, foreign or newer baseline gives exit code 2 and one line."""
    Path("bad.json").write_text(damaged(Path("baselines/b.json").read_text())[words])
    assert main(["gate", "results/base", "--baseline", "bad.json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err.splitlines()[0]
    assert len([line for line in captured.err.splitlines() if line.startswith("error: ")]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["gate", "results/base", "--baseline", "missing.json"],
        ["gate", "results/base"],
        ["gate", "results/nothing", "--baseline", "baselines/b.json"],
        ["gate", "results/base", "--baseline", "baselines/b.json", "--format", "html"],
        ["baseline", "results/base", "--output", "baselines/b.json/below"],
    ],
    ids=" ".join,
)
def test_wrong_usage(here: Path, arguments: list[str], capsys: Captured) -> None:
    """A missing file, a missing option and an unknown format give exit code 2."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")


def test_the_rules_are_stated_where_they_are_decided() -> None:
    """The module that decides says what it compares, in both directions, and what it leaves out."""
    text = compare.__doc__ or ""
    for words in ("Both directions fail", "Bonferroni", "No times", "never a pass", "FAIL in the run fails"):
        assert words in text
    with pytest.raises(UsageError):
        snapshot.read(Path("no such file"))


# ---- Two faults that the gate is for ------------------------------------------------------------------

TARGET = Toy.random(3, seed=2, spread=1.5)
DRAFTS = {"good": TARGET.blurred(1.2, seed=52), "bad": Toy(-1.5 * TARGET.logits)}
DRAWS, HORIZON = 20_000, 4


@pytest.mark.parametrize("regime", DRAFTS)
def test_accepting_too_often_shows_in_counts_and_in_the_distribution(regime: str) -> None:
    """The slack raises acceptance, and 20,000 continuations of one prompt are enough to see it."""
    law = TARGET.exact_law((0, 1), HORIZON)
    rates = []
    for rule, found in ((RejectionSampling(), False), (AcceptsTooOften(), True)):
        offered = [
            Request(i, (0, 1), SamplingParams(seed=77_000_000 + i, max_new_tokens=HORIZON))
            for i in range(DRAWS)
        ]
        outputs = decode(TARGET, DRAFTS[regime], rule, offered, 3)
        result = judge(
            [(law, [output.tokens for output in outputs])], alpha=ALPHA, generator=np.random.default_rng(1)
        )
        assert result.is_rejected is found
        rounds = [entry for output in outputs for entry in output.rounds]
        rates.append(sum(kept for _, kept in rounds) / sum(drafted for drafted, _ in rounds))
    assert rates[1] > rates[0] + 0.02


SPECS = ("draft:k=3", "early-exit:layers=2,k=3", "ngram:k=3,min=1")


def serve(engine: LocalEngine, spec: str, offered: Sequence[Request], *, broken: bool, **how: Any) -> Served:
    engine.open(spec, alter=shift if broken else None)
    return collect(engine.serve(Schedule(tuple(offered), **{"concurrency": 4, **how})))


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    model = shared("llama")
    return LocalEngine(copied(model, "sdpa"), eos_ids=(), draft=perturbed(model, 0.1), rows=8, width=CONTEXT)


@pytest.mark.parametrize("spec", SPECS)
def test_a_shifted_draft_costs_acceptance_only(spec: str, engine: LocalEngine) -> None:
    """Greedy output stays the oracle's; over 32 prompts the gate sees acceptance fall."""
    prompts = [tuple((7 * i + j * (i % 5 + 1)) % 17 for j in range(6 + i % 7)) for i in range(32)]
    sides = []
    for broken in (False, True):
        parts = {}
        for temperature in (0.0, 1.0):
            offered = [
                Request(
                    i,
                    prompt,
                    SamplingParams(temperature=temperature, seed=i, max_new_tokens=32),
                    f"p{i:03}",
                )
                for i, prompt in enumerate(prompts)
            ]
            served = serve(engine, spec, offered, broken=broken)
            if temperature == 0:
                model = shared("llama")
                assert served.outputs[:6] == [greedy(model, prompt, 32) for prompt in prompts[:6]]
            key = cell(strategy=spec, temperature=temperature)
            parts[key] = count_cell(CellRecords(key, (serving(served, key),)))
        sides.append(dataclasses.replace(BASELINE, audits=(), cells=parts))
    result = gate(*sides)
    assert result.exit_code == 1
    totals = {c.metric: c.outcome for c in result.comparisons if c.cell is None}
    assert totals["draft_acceptance_rate"] == "fell"
    assert "rose" not in {c.outcome for c in result.comparisons}


@pytest.mark.parametrize("spec", SPECS)
def test_a_shifted_draft_keeps_the_distribution(spec: str) -> None:
    """4,000 continuations of the shifted decoder pass the chi-squared test against the exact law."""
    model = build("llama", vocab_size=8, head=0.3)
    small = LocalEngine(
        copied(model, "sdpa"), eos_ids=(), draft=perturbed(model, 0.3), rows=250, width=CONTEXT
    )
    prompt, draws, horizon = (1, 2, 3, 1, 2, 3, 1), 4000, 6
    offered = [
        Request(i, prompt, SamplingParams(seed=9_000 + i, max_new_tokens=horizon)) for i in range(draws)
    ]
    served = serve(small, spec, offered, broken=True, concurrency=250, share_prefill=True)
    law = Oracle(copied(model, "sdpa"), SamplingParams(max_new_tokens=horizon)).continuation_law(
        prompt, horizon, floor=10 / draws
    )
    result = judge(
        [(law, [tuple(output) for output in served.outputs])],
        alpha=ALPHA,
        generator=np.random.default_rng(3),
    )
    assert result.is_rejected is False
    assert sum(entry.accepted for entry in served.rounds) > 100
    assert sum(entry.rejected for entry in served.rounds) > 100
