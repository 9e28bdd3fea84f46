"""The audit in bfloat16 or float16: what is measured of rounding first, and what may then be called a fault.

No law is known exactly here: batch and width change the numbers, and ordinary decoding itself is a little
off from any reference. So nothing alarms that rounding could explain. The floor is measured before a token
is judged; speculation is compared with ordinary decoding, request by request; and one arm is compared with
the reference, beyond a margin. `session` decodes; float32 audits are judged there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from specbench.audit import continuations, margin_power, session, tolerant_contracts, two_arms
from specbench.audit.alternatives import Alternatives, FloatArray, Plan, Scores
from specbench.audit.budget import (
    BUDGETS,
    RUN_ALPHA,
    Budget,
    Control,
    Setting,
    Speculation,
    alpha_for,
    combine,
)
from specbench.audit.collisions import Collisions
from specbench.audit.contracts import ContractResult
from specbench.audit.contracts import component as contracts_component
from specbench.audit.draft_laws import DraftLaw, SyntheticLaw
from specbench.audit.e_process import FEWEST_SEQUENCES, MarginProcess
from specbench.audit.greedy_regret import FEWEST_TOKENS, GreedyRegret, Tolerance, tolerance
from specbench.audit.numerical_floor import MARGIN_FACTOR, Floor, FloorMeter, Text, spread, upcast
from specbench.audit.paired import CALIBRATION_PAIRS, Paired
from specbench.audit.reference import Oracle
from specbench.audit.session import OUTPUT_TOKENS, OWN, SCORED_VALUES, Alter, Progress, Subject, together
from specbench.audit.verdicts import (
    AuditRecord,
    ChiSquaredVerdict,
    ComponentResult,
    EffectRecord,
    FloorRecord,
    Verdict,
)
from specbench.records import Request, SamplingParams, derived_seed

SETTING: Setting = "lower precision"
OFF_STREAMS = 100
"""Regimes have the streams of random numbers from 0 on; their ordinary arms those from here on."""
FLOOR_STREAM = 900
MEASURED_DRAWS = 64
"""Continuations of each prompt along which the distance between widths is added up."""
PLAN_EVERY = 8
"""What there is to find in a direction is worked out on one context in so many."""


def untruncated(sampling: SamplingParams) -> SamplingParams:
    """Return the sampling that lower precision is audited at: nothing cut off.

    Which token is the last of top-k or top-p is decided by rounding where two are close, so a token
    outside the reference's set is nobody's fault, and p / q there is 0 or infinite.
    """
    return replace(sampling, top_k=0, top_p=1.0, min_p=0.0)


def left_out(sampling: SamplingParams) -> tuple[str, ...]:
    """Return the parameters that `untruncated` takes away from some sampling."""
    plain = untruncated(sampling)
    return tuple(n for n in ("top_k", "top_p", "min_p") if getattr(sampling, n) != getattr(plain, n))


class Instrument:
    """What the strategies of one run share: the reference, the floor, the tolerance of greedy decoding.

    The floor is measured here, on texts of ordinary decoding that are not judged, at width 1 and at the
    widths of all strategies, in one row and in a full batch. A budget smaller than `quick` measures less, and
    then what it says of temperature 0 is inconclusive.

    Args:
        subject: What is audited, its engine in the timed dtype. Truncation is taken off.
        names: The strategies of the run.
    """

    def __init__(self, subject: Subject, names: Sequence[str]) -> None:
        self.dropped = left_out(subject.sampling)
        self.model, self.reference = upcast(subject.engine.runner.model)
        self.subject = replace(subject, sampling=untruncated(subject.sampling))
        if self.dropped:
            scales = session.calibrate_regimes(self.oracle(), subject.prompts)
            self.subject = replace(self.subject, scales=scales)
        self.floor = self._measure([self.width_of(name) for name in names])
        self.tolerance: Tolerance = tolerance(self.floor.regrets, dtype=subject.dtype)

    def oracle(self, sampling: SamplingParams | None = None) -> Oracle:
        """Return the reference for some sampling; the audited one by default."""
        return Oracle(self.model, sampling or self.subject.sampling, self.subject.engine.eos_ids)

    def width_of(self, name: str) -> int:
        """Return how many tokens of a row one verification of a strategy reads at most."""
        self.subject.engine.open(name)
        assert self.subject.engine.strategy is not None
        return min(self.subject.engine.strategy.lookahead + 1, OUTPUT_TOKENS - 1)

    def record(self, continuation: float | None) -> FloorRecord:
        """Return the floor as it is stored."""
        floor = self.floor
        return FloorRecord(
            reference=self.reference,
            rows=floor.rows,
            margin=floor.margin,
            paired_margin=floor.paired_margin,
            largest_shift=floor.largest_shift[0],
            direction=floor.largest_shift[1],
            regret=self.tolerance.value,
            continuation=continuation,
        )

    def _measure(self, widths: Sequence[int]) -> Floor:
        subject = self.subject
        rows = min(subject.engine.rows, subject.rows)
        oracle = self.oracle()
        drafts = [SyntheticLaw(oracle, subject.scales[name]) for name in ("good", "bad")]
        meter = FloorMeter(subject.engine.runner, oracle, widths, rows, drafts)
        wanted = FEWEST_TOKENS * min(1.0, subject.budget.tokens / BUDGETS["quick"].tokens)
        decoder = session.Auditor(subject, "ordinary", lambda strategy: strategy, lambda _: None)
        number = 0
        while meter.num_regrets < wanted:
            meter.measure(self._texts(decoder, range(number, number + rows)))
            number += rows
        return meter.result()

    def _texts(self, decoder: session.Auditor, numbers: range) -> list[Text]:
        """Decode texts of one length, EOS or not."""
        subject = self.subject
        sampling = replace(subject.sampling, max_new_tokens=OUTPUT_TOKENS, ignore_eos=True)
        requests = [
            Request(
                number,
                subject.prompts[number % len(subject.prompts)],
                replace(sampling, seed=derived_seed(subject.seed, FLOOR_STREAM, number)),
                f"floor-{number}",
            )
            for number in numbers
        ]
        requests.sort(key=lambda request: request.id % len(subject.prompts))
        found = decoder.serve(decoder.regimes[0], requests)
        return [(served.prompt, served.record.output_tokens) for served in found]


@dataclass(slots=True)
class _Arm:
    """What is kept of some requests of one arm, in order: per request sums over its tokens."""

    lengths: list[int] = field(default_factory=list)
    sums: list[FloatArray] = field(default_factory=list)
    """Of 1[x in A] - p(A) [directions]."""
    room: list[FloatArray] = field(default_factory=list)
    """Of how far p(A) could have risen [directions]."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """The evidence of one test, for the table. `alarm_at` is in tokens."""

    test: str
    words: str
    log_e: float
    bar: float
    alarm_at: int | None


def audit(
    instrument: Instrument,
    name: str,
    *,
    alter: Alter | None = None,
    injected: str | None = None,
    controls: Sequence[Control] = (),
    progress: Progress | None = None,
    stage: Callable[[str], None] = lambda _: None,
) -> AuditRecord:
    """Audit one strategy in lower precision and conclude; as `session.audit`, with another instrument."""
    auditor = _Auditor(instrument, name, alter or (lambda strategy: strategy), progress or (lambda _: None))
    began = time.perf_counter()
    stage(f"{name}: pairs")
    auditor.draw()
    seconds = {"pairs": time.perf_counter() - began}
    stage(f"{name}: contracts")
    promised = auditor.keep_contracts()
    arms = None
    if instrument.subject.branch_prompts and not auditor.paired.mixture.alarm:
        stage(f"{name}: chi-squared")
        arms = auditor.compare_continuations()
    seconds["all"] = time.perf_counter() - began
    return auditor.conclude(promised, arms, controls, injected, seconds)


def false_control(instrument: Instrument, alter: Alter, fault: str) -> Control:
    """Plant a large fault in speculation with a bad draft: the paired test must notice."""
    small = replace(
        instrument.subject,
        budget=Budget("control", session.CONTROL_TOKENS, 1.0),
        strategies=1,
        batch=session.CONTROL_BATCH,
    )
    auditor = _Auditor(
        instrument, session.CONTROL_STRATEGY, alter, lambda _: None, subject=small, regimes=("bad",)
    )
    auditor.draw()
    return Control(fault, expected_alarm=True, alarm=auditor.paired.mixture.alarm)


class _Auditor:
    """The state of one strategy's audit: two decoders, and what their requests say."""

    def __init__(
        self,
        instrument: Instrument,
        name: str,
        alter: Alter,
        progress: Progress,
        *,
        subject: Subject | None = None,
        regimes: Sequence[str] | None = None,
    ) -> None:
        self.instrument = instrument
        self.subject = subject or instrument.subject
        self.name = name
        self.progress = progress
        self.oracle = instrument.oracle()
        self.off = session.Auditor(self.subject, "ordinary", lambda strategy: strategy, progress)
        self.on = session.Auditor(self.subject, name, alter, progress, regimes=regimes)
        self.alternatives = Alternatives(has_draft=True)
        self.directions = tuple(direction.name for direction in self.alternatives.directions)
        self.paired = Paired(self.level("paired"), self.directions)
        floor = instrument.floor
        self.margin = MarginProcess(margin=floor.margin, alpha=self.level("margin"))
        self.collisions = Collisions(self.level("collisions"))
        self.regret = GreedyRegret(self.level("greedy regret"), instrument.tolerance)
        self.arms = _Arm(), _Arm()
        self.witness: list[FloatArray] = []
        self.plan: Plan = self.alternatives.empty_plan()
        self.unsupported = self.numbers = self.tokens = 0
        self.margin_alarm_at: int | None = None
        self.continuation_floor: float | None = None
        self.off_draws = 0

    def level(self, test: str) -> float:
        """Return the level of one test of this strategy."""
        return alpha_for(test, setting=SETTING, strategies=self.subject.strategies)

    @property
    def allowed(self) -> float:
        """By how much the sums of a pair may differ because of widths and batches alone."""
        return self.instrument.floor.paired_margin * OUTPUT_TOKENS

    # Pairs

    def draw(self) -> None:
        """Spend the budget, or stop at the alarm of the paired test, which then needs no more."""
        while self.tokens < self.subject.budget.tokens:
            for regime in self.on.regimes:
                before = self.tokens
                self._batch(regime)
                self.progress(self.tokens - before)
                if self.paired.mixture.alarm or self.unsupported:
                    return
        self._greedy()

    def _batch(self, regime: session.Regime) -> None:
        """Decode some pairs of a regime, both arms one after the other, and judge them in order."""
        share = math.ceil(self.subject.budget.tokens / (len(self.on.regimes) * OUTPUT_TOKENS))
        numbers = range(self.numbers, self.numbers + min(self.subject.batch, share))
        self.numbers = numbers.stop
        law = regime.law or SyntheticLaw(self.oracle, self.subject.scales["good"])
        found = []
        for decoder, own, stream in ((self.on, regime, 0), (self.off, self.off.regimes[0], OFF_STREAMS)):
            requests = [self._request(number, stream) for number in numbers]
            requests.sort(key=lambda request: request.id % len(self.subject.prompts))
            served_now = decoder.serve(own, requests)
            own.count(entry for served in served_now for entry in served.rounds)
            found.append({served.number: served for served in served_now})
        both = sorted(found[0].keys() & found[1].keys())
        scored = [self._scored([served[number] for number in both], law) for served in found]
        for arm, is_on in zip(scored, (True, False), strict=True):
            self._take(arm, is_on=is_on)
        sums = [np.stack(arm.sums[len(arm.sums) - len(both) :]) for arm in self.arms] if both else []
        scored_tokens = self.tokens
        for number, scores, log_p in scored[0]:
            served = found[0][number]
            self.margin.update(scores)
            scored_tokens += len(scores)
            if self.margin.is_rejected and self.margin_alarm_at is None:
                self.margin_alarm_at = scored_tokens
            slack = self.instrument.floor.likelihood_excess * MARGIN_FACTOR * len(scores)
            key = regime.name, served.prompt
            self.collisions.add(key, served.record.output_tokens, min(0.0, log_p + slack))
            self.unsupported += int((~scores.supported).sum())
        if both:
            num = sum(self.arms[0].lengths[-len(both) :])
            self.paired.add(sums[0] - sums[1], tokens=num, allowed=self.allowed)
            self.tokens += num

    def _request(self, number: int, stream: int) -> Request:
        sampling = replace(
            self.subject.sampling,
            seed=derived_seed(self.subject.seed, stream, number),
            max_new_tokens=OUTPUT_TOKENS,
        )
        prompt = self.subject.prompts[number % len(self.subject.prompts)]
        return Request(number, prompt, sampling, f"audit-{number}")

    def _scored(self, found: Sequence[session.Served], law: DraftLaw) -> list[tuple[int, Scores, float]]:
        """Score whole outputs against the reference; return number, scores and log p of each, in order."""
        texts = [(served.prompt, served.record.output_tokens) for served in found]
        scored: dict[int, tuple[int, Scores, float]] = {}
        waiting: list[tuple[int, Tensor, Tensor]] = []
        for place, logits in self.oracle.along(texts):
            p = self.oracle.law(logits, *texts[place]).cpu()
            q = law.laws(*texts[place], logits, p).cpu()
            waiting.append((place, p, q))
            if sum(each.numel() for _, each, _ in waiting) >= SCORED_VALUES:
                scored |= self._score(found, waiting)
                waiting = []
        scored |= self._score(found, waiting)
        return [scored[place] for place in sorted(scored)]

    def _score(
        self, found: Sequence[session.Served], waiting: Sequence[tuple[int, Tensor, Tensor]]
    ) -> dict[int, tuple[int, Scores, float]]:
        if not waiting:
            return {}
        p, q = together([law for _, law, _ in waiting]), together([law for _, _, law in waiting])
        tokens = torch.tensor([t for place, _, _ in waiting for t in found[place].record.output_tokens])
        scores = self.alternatives.score(p, tokens, q)
        self.plan = self.plan + self.alternatives.plan(p[::PLAN_EVERY], q[::PLAN_EVERY])
        chosen = p.gather(1, tokens[:, None]).squeeze(1).log()
        kept, start = {}, 0
        for place, own, _ in waiting:
            stop = start + len(own)
            log_p = float(chosen[start:stop].sum())
            kept[place] = found[place].number, scores.take(slice(start, stop)), log_p
            start = stop
        return kept

    def _take(self, scored: Sequence[tuple[int, Scores, float]], *, is_on: bool) -> None:
        """Keep what each request of an arm says."""
        arm = self.arms[0 if is_on else 1]
        for _, scores, _ in scored:
            arm.lengths.append(len(scores))
            arm.sums.append(scores.witness.sum(0))
            if is_on:
                mass = margin_power.favoured_mass(scores.witness)
                arm.room.append(np.where(mass > 0, 1 - mass, 0.0).sum(0))
                self.witness.append(scores.witness)

    def _greedy(self) -> None:
        """Decode every prompt at temperature 0 in every regime, and compare the logits."""
        greedy = replace(self.subject.sampling, temperature=0.0, max_new_tokens=session.GREEDY_TOKENS)
        plain = self.instrument.oracle(replace(greedy, temperature=1.0))
        requests = [Request(i, p, greedy, f"greedy-{i}") for i, p in enumerate(self.subject.prompts)]
        found = [served for regime in self.on.regimes for served in self.on.serve(regime, requests)]
        for values in session.greedy_regrets(plain, found):
            self.regret.add(values)

    # Other checks

    def keep_contracts(self) -> tuple[ContractResult, ...]:
        """Try what a decoder owes its callers in any precision."""
        return tolerant_contracts.check(replace(self.on.contract_subject(), repeats_ordinary=False))

    def compare_continuations(self) -> two_arms.TwoArms | None:
        """Compare whole continuations with those of ordinary decoding; None if some were lost."""
        subject, engine = self.subject, self.subject.engine
        alpha = self.level("chi-squared")
        prompts = subject.branch_prompts
        each = two_arms.draws_per_prompt(subject.budget.continuation_tv, alpha, len(prompts))
        horizon = self.on.opened.max_draft + 3
        plan = continuations.Plan(horizon, (each,) * len(prompts), (), alpha)

        def sampling_of(horizon: int, seed: int) -> SamplingParams:
            return untruncated(subject.chi_sampling(horizon, seed))

        drawn = []
        for arm, (spec, alter) in enumerate(
            ((self.name, self.on.alter), ("ordinary", lambda strategy: strategy))
        ):
            engine.open(spec, alter=alter)
            seed = subject.seed + 1 + arm
            drawn.append(continuations.draw(engine, prompts, plan, seed=seed, sampling_of=sampling_of))
        if any(arm.failures for arm in drawn):
            self.on.lost += sum(arm.failures for arm in drawn)
            return None
        self.continuation_floor = self._continuation_floor(drawn[1], sampling_of(horizon, 0))
        arms = list(zip(drawn[0].continuations, drawn[1].continuations, strict=True))
        return two_arms.judge(arms, floor=self.continuation_floor, alpha=alpha, seed=subject.seed + 1)

    def _continuation_floor(self, drawn: continuations.Drawn, sampling: SamplingParams) -> float:
        """Bound what widths do to whole continuations, on some that ordinary decoding drew."""
        subject = self.subject
        oracle = self.instrument.oracle(sampling)
        width = min(self.instrument.width_of(self.name), sampling.max_new_tokens - 1)
        means = []
        for prompt, outputs in zip(subject.branch_prompts, drawn.continuations, strict=True):
            rows = min(MEASURED_DRAWS, subject.engine.rows)
            # What ended early goes on with its last token: more is added up, never less.
            texts = [
                (prompt, (*output, *[output[-1]] * (sampling.max_new_tokens - len(output))))
                for output in outputs[:rows]
            ]
            means.append(np.mean(list(spread(subject.engine.runner, oracle, texts, width))))
        return MARGIN_FACTOR * float(np.mean(means))

    # The verdict

    def conclude(
        self,
        promised: tuple[ContractResult, ...],
        arms: two_arms.TwoArms | None,
        controls: Sequence[Control],
        injected: str | None,
        seconds: dict[str, float],
    ) -> AuditRecord:
        """Make one verdict of everything found."""
        subject, mixture = self.subject, self.paired.mixture
        if not self.on.speculates:
            alarm = mixture.alarm or self.margin.is_rejected
            controls = [*controls, Control("ordinary decoding", False, alarm)]
        components = [*self._evidence(), contracts_component(promised)]
        if arms is not None:
            draws = arms.result.on_draws
            components.append(arms.component(draws * (self.on.opened.max_draft + 3)))
        regimes = self.on.regimes
        speculation = Speculation(
            sum(regime.drafted for regime in regimes),
            sum(regime.accepted for regime in regimes),
            sum(regime.rejected for regime in regimes),
        )
        detectable = self.detectable()
        conclusion = combine(
            components,
            alpha=RUN_ALPHA / subject.strategies,
            claims_lossless=self.on.opened.lossless,
            speculates=self.on.speculates,
            speculation=speculation,
            controls=controls,
            smallest_detectable=detectable,
            promised_tv=subject.budget.promised_tv,
            lost=self.on.lost + self.off.lost,
        )
        shown = self._shown()
        return AuditRecord(
            strategy=self.name,
            verdict=conclusion.verdict,
            reasons=conclusion.reasons,
            components=tuple(components),
            budget=subject.budget.name,
            promised_tv=subject.budget.promised_tv,
            tokens=self.tokens,
            sequences=self.paired.pairs,
            prompts=len(subject.prompts),
            dtype=subject.dtype,
            alpha=sum(component.alpha for component in components),
            log_e=shown.log_e,
            bar=shown.bar,
            tokens_at_alarm=shown.alarm_at,
            family=shown.test,
            alternative=shown.words,
            regime=OWN if len(regimes) == 1 else "all",
            effect=self._effect(),
            detectable=detectable,
            acceptance={
                regime.name: regime.accepted / (regime.accepted + regime.rejected) if regime.drafted else None
                for regime in regimes
            },
            drafted=speculation.drafted,
            accepted=speculation.accepted,
            rejected=speculation.rejected,
            contracts_held=sum(result.held is True for result in promised),
            contracts_tried=sum(result.held is not None for result in promised),
            chi_squared=self._chi_squared(arms, injected),
            lossless_claimed=self.on.opened.lossless,
            seconds=seconds,
            injected=injected,
            floor=self.instrument.record(self.continuation_floor),
        )

    def _shown(self) -> _Shown:
        """Return the evidence that the table shows: the pairs', or the margin's where that alone alarmed."""
        mixture, test = self.paired.mixture, self.margin
        if test.is_rejected and not mixture.alarm and test.best is not None:
            words = f"{self.directions[test.best]}, above the reference"
            return _Shown("margin", words, test.log_supremum, -math.log(test.alpha), self.margin_alarm_at)
        pairs = None if mixture.alarm_at is None else mixture.alarm_at + CALIBRATION_PAIRS
        alarm_at = None if pairs is None else sum(self.arms[0].lengths[:pairs])
        return _Shown("paired", self.paired.best, mixture.peak, mixture.threshold, alarm_at)

    def _evidence(self) -> list[ComponentResult]:
        """Return what every test but contracts and continuations says."""
        results = []
        if self.unsupported and self.on.opened.lossless:
            words = f"{self.unsupported} of {self.tokens} tokens are ones that were forbidden"
            results.append(
                ComponentResult("support", True, float(self.unsupported), "exact", 0.0, self.tokens, words)
            )
        results.append(self.paired.result())
        results.append(self._margin_component())
        results.append(self.on.identities_component())
        results.append(self.collisions.result())
        if self.regret.mixture.steps:
            results.append(self.regret.result())
        if self.instrument.dropped:
            names = ", ".join(self.instrument.dropped)
            words = f"{names} left out: rounding moves what is cut off; float32 judges it"
            results.append(ComponentResult("truncation", False, None, "exact", 0.0, 0, words))
        return results

    def _margin_component(self) -> ComponentResult:
        test = self.margin
        peak, bar = test.log_supremum, -math.log(test.alpha)
        sign = "at or above" if test.is_rejected else "below"
        words = (
            f"beyond a margin of TV {test.margin:.4f} per token from the reference: log e {peak:.1f}, {sign} "
            f"{bar:.1f}"
        )
        return ComponentResult(
            "margin", test.is_rejected, peak, "log e", test.alpha, self.tokens, words, bool(self.witness)
        )

    def detectable(self) -> dict[str, float | None]:
        """Return, per direction, the TV per token that one of the two tests would have found.

        Or all that there is to find in a direction, where that is less.
        """
        found: list[list[float | None]] = []
        if self.witness:
            witness = np.concatenate(self.witness)
            found.append(margin_power.by_one_arm(witness, margin=self.margin.margin, alpha=self.margin.alpha))
        if self.paired.scale is not None:
            on, off = (np.stack(arm.sums)[CALIBRATION_PAIRS:] for arm in self.arms)
            found.append(
                margin_power.by_pairs(
                    on - off,
                    np.stack(self.arms[0].room)[CALIBRATION_PAIRS:],
                    sum(self.arms[0].lengths[CALIBRATION_PAIRS:]),
                    scale=self.paired.scale,
                    allowed=self.allowed,
                    alpha=self.paired.mixture.alpha,
                )
            )
        hidden: dict[str, float | None] = {}
        for place, name in enumerate(self.directions):
            values = [each[place] for each in found]
            known = [value for value in values if value is not None]
            if self.plan.rows:
                known.append(float(self.plan.tv[name][-1]) / self.plan.rows)
            hidden[name] = min(known, default=None)
        return hidden

    def _effect(self) -> EffectRecord | None:
        """Estimate how far on is from off, in the direction that every other pair speaks for most."""
        if self.paired.pairs < 2 * FEWEST_SEQUENCES:
            return None
        from scipy import stats  # takes half a second

        on, off = (np.stack(arm.sums) for arm in self.arms)
        differences, lengths = on - off, np.array(self.arms[0].lengths)
        chosen = differences[0::2]
        spoken = chosen.sum(0) / np.sqrt((chosen**2).sum(0)).clip(min=1e-12)
        column = int(np.abs(spoken).argmax())
        sign = math.copysign(1.0, spoken[column])
        values, sizes = sign * differences[1::2, column], lengths[1::2]
        tv = float(values.sum() / sizes.sum())
        error = float(np.std(values - tv * sizes, ddof=1) / math.sqrt(len(values)) / sizes.mean())
        half = float(stats.t.ppf(0.975, len(values) - 1)) * error
        direction = f"{self.directions[column]}, on {'above' if sign > 0 else 'below'} off"
        return EffectRecord(direction, tv, tv - half, tv + half)

    def _chi_squared(self, arms: two_arms.TwoArms | None, injected: str | None) -> ChiSquaredVerdict | None:
        """Return the comparison of continuations in the form that float32's has."""
        if arms is None:
            return None
        found = arms.result
        verdict: Verdict = "FAIL" if arms.alarm else "PASS" if found.p_value is not None else "INCONCLUSIVE"
        if not self.on.opened.lossless:
            verdict = "LOSSY"
        return ChiSquaredVerdict(
            strategy=self.name,
            verdict=verdict,
            reason=arms.component(0).words,
            lossless_claimed=self.on.opened.lossless,
            dtype=self.subject.dtype,
            temperature=self.subject.sampling.temperature,
            top_k=0,
            prompts=found.prompts,
            draws=found.on_draws,
            horizon=self.on.opened.max_draft + 3,
            statistic=found.statistic,
            df=found.df,
            p_value=found.p_value,
            alpha=found.alpha,
            tv_observed=found.tv_observed,
            tv_upper=None,
            smallest_detectable_tv=found.smallest_detectable_tv,
            out_of_support=0,
            drafted=0,
            accepted=0,
            rejections=0,
            fully_accepted=0,
            seconds=0.0,
            injected=injected,
        )
