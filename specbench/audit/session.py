"""One strategy's audit in process: draw, score, test, in batches, until the budget is spent or an alarm.

Everything AUDIT.md asks of a decoder that runs here meets in this file: the regimes take turns batch by
batch, every sequence is scored whole and in the order of its submission, and the components become one
verdict. What is measured is decided before it is drawn: nothing depends on how tokens turned out, but
stopping at an alarm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specbench.audit import continuations, contracts, logprob_check, parameter_probe, record_checks, regimes
from specbench.audit.acceptance import BlockAcceptance, TokenAcceptance, block_expectation
from specbench.audit.alternatives import Alternatives, Plan, Scores
from specbench.audit.budget import RUN_ALPHA, Budget, Conclusion, Control, Speculation, alpha_for, combine
from specbench.audit.collisions import Collisions
from specbench.audit.draft_laws import DraftLaw, SyntheticLaw, own_law
from specbench.audit.e_process import EProcess, EProcessResult
from specbench.audit.greedy_regret import GreedyRegret, Tolerance, regrets
from specbench.audit.proposals import Proposals, Weighed
from specbench.audit.reference import Oracle
from specbench.audit.synthetic import with_synthetic_draft
from specbench.audit.traces import TraceRecorder, randomised_pit
from specbench.audit.verdicts import (
    AuditRecord,
    ChiSquaredVerdict,
    ComponentResult,
    EffectRecord,
    Place,
    chi_squared_component,
)
from specbench.decoding.exact_match import ExactMatch
from specbench.engines.local import LocalEngine
from specbench.errors import IdentityViolation
from specbench.metrics import identities
from specbench.records import (
    CellKey,
    CellRecords,
    Request,
    RequestRecord,
    RoundRecord,
    SamplingParams,
    Schedule,
    Serving,
    StepRecord,
    derived_seed,
)
from specbench.runtime.events import Finished, Stepped
from specbench.runtime.protocols import Strategy

OWN = "own"
BATCH = 64
"""The most sequences that one regime decodes before the next takes its turn."""
USUAL_SHARE = 0.92
"""Of the most tokens, what sequences have on average: some end early, and a small second batch costs more."""
FEWEST = 8
"""The fewest, where hardly anything is missing: a batch that decodes well."""
OUTPUT_TOKENS = 64
"""The most tokens of one sequence: many rounds, and the prompt that is scored with them matters little."""
GREEDY_TOKENS = 24
PROBE_TOKENS = 32
SCORED_VALUES = 1_000_000
"""Probabilities of p that are collected before they are scored together: 8 MB, or one sequence's."""
PLAN_VOCAB, PLAN_LEAST = 32, 1 / 64
"""What could be found is worked out on every context up to this vocabulary, on a smaller share beyond."""
CONTROL_TOKENS, CONTROL_BATCH = 4_000, 8
"""A large fault alarms within a few hundred tokens, and what follows the alarm is for nothing."""
CONTRACT_GRAMMAR = "regex:(one|two|three)(, (one|two|three)){2,8}"
"""Has text that a model would hardly write unasked, and goes on long enough for several rounds."""
CONTRACT_PROMPTS, CONTRACT_ROWS = 3, 12
BLOCK_ROUNDS = 400
"""Rounds of block verification whose drafts are scored too, in forwards of their own."""
CLAIM_TOLERANCE = 1e-3
"""How far a claimed q may be from the auditor's: two float32 forwards differ by some 1e-5."""
LOGPROBS_LISTED = 3
LOGPROBS_UNDER: Mapping[str, Any] = {"temperature": 0.7, "frequency_penalty": 0.5}
"""Log-probabilities are asked for a second time under these, so that raw and processed ones differ."""
LARGEST_REGRET = 1e6
"""Stands for infinity, of a token that cannot be."""
FLOAT32_REGRET = 1e-3
"""Two float32 forwards of one model differ by some 1e-5 in a logit; a regret above this is none of that."""

Alter = Callable[[Strategy], Strategy]
State = dict[str, Any]
"""What an audit needs to go on later, in JSON types."""


class Progress(Protocol):
    """Told how many tokens were scored."""

    def __call__(self, tokens: int) -> None:
        """Take a number of tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Subject:
    """What is audited, on what, and how hard.

    Args:
        engine: decodes in the audited precision; its rows bound the batch.
        sampling: of the sampled sequences, but for seed and length.
        prompts: token ids; several, so that no direction is judged on one text.
        branch_prompts: of the chi-squared check; empty leaves it out.
        strategies: how many share the run's error budget.
        scales: the noise of the synthetic drafts, by regime (`calibrate_regimes`).
        rows: requests decoded together at most.
        batch: sequences of one regime at a time at most.
    """

    engine: LocalEngine
    sampling: SamplingParams
    prompts: tuple[tuple[int, ...], ...]
    branch_prompts: tuple[tuple[int, ...], ...]
    budget: Budget
    strategies: int
    seed: int
    dtype: str
    scales: Mapping[str, float]
    chi_sampling: continuations.SamplingOf = continuations.sampling
    rows: int = 64
    batch: int = BATCH

    def oracle(self, sampling: SamplingParams | None = None) -> Oracle:
        """Return the reference for some sampling; the audited one by default."""
        return Oracle(self.engine.runner.model, sampling or self.sampling, self.engine.eos_ids)

    def level(self, test: str) -> float:
        """Return the level of one test of one strategy."""
        return alpha_for(test, setting="in process", strategies=self.strategies)


def calibrate_regimes(
    oracle: Oracle, prompts: Sequence[Sequence[int]], *, most_rows: int = 96
) -> dict[str, float]:
    """Find the noise of each synthetic draft on the prompts themselves, which are not audited."""
    rows: list[Tensor] = []
    for prompt in prompts:
        if len(prompt) > 1:
            rows.append(next(oracle.rows(prompt[:1], [prompt[1:]]))[1])
    logits = torch.cat(rows)
    logits = logits[:: max(1, len(logits) // most_rows)]

    def law(values: Tensor) -> Tensor:
        return oracle.law(values, prompts[0], [0] * len(values))

    return {
        name: regimes.calibrate(logits, wanted, process=law) for name, wanted in regimes.ACCEPTANCE.items()
    }


@dataclass(slots=True)
class Regime:
    """One stream of sequences: how it is decoded, and the auditor's draft law along it."""

    name: str
    alter: Alter
    law: DraftLaw | None
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0

    def count(self, rounds: Iterable[RoundRecord]) -> None:
        """Count the rounds of sequences that are judged; other checks draw in other ways."""
        for entry in rounds:
            self.drafted += entry.drafted
            self.accepted += entry.accepted
            self.rejected += entry.rejected


@dataclass(frozen=True, slots=True)
class Served:
    """What came of one request: its record, and what was drafted for it round by round."""

    number: int
    prompt: tuple[int, ...]
    record: RequestRecord
    rounds: tuple[RoundRecord, ...]


Coins = tuple[list[bool], list[float], list[float]]
"""Outcome of each tested draft token, p of it and q of it, as `TokenAcceptance.add` takes them."""


_Laws = tuple[int, Tensor, Tensor | None]
"""The place of a sequence among those served, and p and q along it."""


@dataclass(slots=True)
class _Scored:
    """What is kept of one sequence once it was scored: numbers per token, no laws."""

    scores: Scores
    log_p: float
    coins: Coins
    claims: tuple[Weighed, int] | None
    pit: np.ndarray[Any, Any]


def audit(
    subject: Subject,
    name: str,
    *,
    alter: Alter | None = None,
    injected: str | None = None,
    controls: Sequence[Control] = (),
    progress: Progress | None = None,
    stage: Callable[[str], None] = lambda _: None,
    sequences_only: bool = False,
    saved: Mapping[str, Any] | None = None,
    save: Callable[[Callable[[], State]], None] = lambda _: None,
) -> AuditRecord:
    """Audit one strategy and conclude; see `Subject` for what it takes.

    `save` is handed a way to get the state after every batch; given back as `saved`, the audit goes on from
    there, under the subject's seed, which must be another: no random number is used again.

    `alter` breaks the strategy on purpose. `sequences_only` leaves out contracts, log-probabilities and
    whole continuations; the verdict is then not PASS. Without an A/A arm and an injected fault among
    `controls` it cannot be PASS either.
    """
    auditor = Auditor(subject, name, alter or (lambda strategy: strategy), progress or (lambda _: None))
    if saved is not None:
        auditor.restore(saved)
    began = time.perf_counter()
    stage(f"{name}: sequences")
    auditor.draw(save)
    seconds = {"decoding": auditor.decoding_s, "scoring": auditor.scoring_s}
    stage(f"{name}: contracts")
    promised: tuple[contracts.ContractResult, ...] = ()
    if not sequences_only:
        auditor.check_logprobs()
        if auditor.speculates and auditor.strategy.lossless:
            auditor.probe_parameters()
        promised = auditor.keep_contracts()
    checked = None
    if subject.branch_prompts and not (sequences_only or auditor.e_process.is_rejected):
        stage(f"{name}: chi-squared")
        checked = auditor.chi_squared()
    result = auditor.conclude(promised, checked, controls, injected)
    seconds["all"] = time.perf_counter() - began
    return replace(result, seconds=seconds)


def tokens_in(state: Mapping[str, Any]) -> int:
    """Return how many tokens were scored up to a saved state."""
    return sum(stream["tokens"] for stream in state["tests"]["e-process"]["streams"].values())


def false_control(subject: Subject, alter: Alter, fault: str) -> Control:
    """Plant a large fault in speculation with a bad draft: the instrument must notice."""
    small = replace(subject, budget=Budget("control", CONTROL_TOKENS, 1.0), strategies=1, batch=CONTROL_BATCH)
    auditor = Auditor(small, CONTROL_STRATEGY, alter, lambda _: None, regimes=("bad",))
    auditor.draw()
    return Control(fault, expected_alarm=True, alarm=auditor.e_process.is_rejected)


@dataclass(frozen=True, slots=True)
class View:
    """One position as the reference sees it. `before` are the output tokens before it."""

    before: tuple[int, ...]
    p: float
    q: float | None
    likeliest: tuple[tuple[int, float], ...]


def look_again(subject: Subject, name: str, place: Place, *, alter: Alter | None) -> View | None:
    """Decode one request again, alone, and score the position; None if the output is another now."""
    auditor = Auditor(subject, name, alter or (lambda strategy: strategy), lambda _: None)
    regime = next(r for r in auditor.regimes if r.name == place.regime)
    sampling = replace(subject.sampling, seed=place.seed, max_new_tokens=OUTPUT_TOKENS)
    sequence = auditor.serve(regime, [Request(0, place.prompt, sampling, "again")])[0]
    output = sequence.record.output_tokens
    if len(output) <= place.offset or output[place.offset] != place.token:
        return None
    _, logits = next(auditor.oracle.rows(place.prompt, [output]))
    p = auditor.oracle.law(logits, place.prompt, output).cpu()
    q = None if regime.law is None else regime.law.laws(place.prompt, output, logits, p)
    best = p[place.offset].topk(5)
    return View(
        before=output[: place.offset],
        p=float(p[place.offset, place.token]),
        q=None if q is None else float(q[place.offset, place.token]),
        likeliest=tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
    )


CONTROL_STRATEGY = "ngram:k=3"
"""Any strategy that drafts: its drafter is replaced by a synthetic one."""


class Auditor:
    """The state of one strategy's audit."""

    def __init__(
        self,
        subject: Subject,
        name: str,
        alter: Alter,
        progress: Progress,
        *,
        regimes: Sequence[str] | None = None,
    ) -> None:
        self.subject = subject
        self.name = name
        self.alter = alter
        self.progress = progress
        self.opened = subject.engine.open(name, alter=alter)
        strategy = subject.engine.strategy
        assert strategy is not None
        self.strategy = strategy
        self.speculates = strategy.drafter is not None
        self.oracle = subject.oracle()
        self.regimes = self._regimes(regimes)
        self.e_process = EProcess(
            {regime.name: regime.law is not None for regime in self.regimes},
            alpha=subject.level("e-process"),
            plan_every=min(int(1 / PLAN_LEAST), max(1, subject.engine.runner.vocab // PLAN_VOCAB)),
        )
        self.traces = TraceRecorder([regime.name for regime in self.regimes])
        self.collisions = Collisions(subject.level("collisions"))
        level = subject.level("acceptance")
        self.acceptance: TokenAcceptance | BlockAcceptance = TokenAcceptance(level)
        if strategy.rule.name == "block":
            self.acceptance = BlockAcceptance(level, longest=max(1, self.opened.max_draft))
        self.block_rounds = 0
        self.proposals = Proposals(subject.level("proposals"))
        floor = Tolerance(FLOAT32_REGRET, 0.0, 10**9, FLOAT32_REGRET)
        self.regret = GreedyRegret(subject.level("greedy regret"), floor)
        self.seeds: dict[tuple[str, int], int] = {}
        self.outputs: dict[tuple[str, int], tuple[int, ...]] = {}
        self.turn, self.each = 0, subject.batch
        self.lost = self.unsupported = self.foreign_claims = 0
        self.schedules = 0
        self.contradictions: list[str] = []
        self.logprobs: ComponentResult | None = None
        self.parameters: parameter_probe.ParameterProbe | None = None
        self.accepted_greedily: dict[tuple[int, ...], int] = {}
        self.numbers = {regime.name: 0 for regime in self.regimes}
        self.decoding_s = self.scoring_s = 0.0

    def _regimes(self, wanted: Sequence[str] | None) -> list[Regime]:
        subject = self.subject
        if not self.speculates:
            # Ordinary decoding, judged as if it speculated: the A/A arm.
            return [Regime(OWN, self.alter, SyntheticLaw(self.oracle, subject.scales["good"]))]

        def synthetic(scale: float) -> Alter:
            return lambda strategy: self.alter(
                with_synthetic_draft(
                    strategy,
                    subject.engine.runner,
                    scale,
                    rows=subject.engine.rows,
                    width=subject.engine.width,
                )
            )

        subject.engine.open(self.name)  # the drafter as it is, not as a fault may have made it
        assert subject.engine.strategy is not None
        found = [Regime(OWN, self.alter, own_law(subject.engine.strategy, subject.sampling))]
        found += [
            Regime(name, synthetic(scale), SyntheticLaw(self.oracle, scale))
            for name, scale in subject.scales.items()
        ]
        return [regime for regime in found if wanted is None or regime.name in wanted]

    # Drawing and scoring

    def draw(self, save: Callable[[Callable[[], State]], None] = lambda _: None) -> None:
        """Spend the budget, or stop at the alarm. The regimes take turns, and all have as many."""
        self.progress(self.e_process.tokens)  # what was drawn before an interruption
        while not self._has_alarm:
            turn = self.turn % len(self.regimes)
            if turn == 0:
                missing = self.subject.budget.tokens - self.e_process.tokens
                if missing <= 0:
                    self._greedy()
                    return
                each = math.ceil(missing / (len(self.regimes) * OUTPUT_TOKENS * USUAL_SHARE))
                self.each = min(self.subject.batch, max(FEWEST, each))
            before = self.e_process.tokens
            self.draw_from(self.regimes[turn])
            self.turn += 1
            self.progress(self.e_process.tokens - before)
            save(self.state)

    def state(self) -> State:
        """Return everything needed to go on later."""
        return {
            "regimes": {r.name: [r.drafted, r.accepted, r.rejected] for r in self.regimes},
            "tests": {
                "e-process": self.e_process.state(),
                "collisions": self.collisions.state(),
                "acceptance": self.acceptance.state(),
                "proposals": self.proposals.state(),
            },
            "traces": self.traces.state(),
            "outputs": [
                [regime, number, self.seeds[regime, number], list(output)]
                for (regime, number), output in self.outputs.items()
            ],
            "numbers": self.numbers,
            "turn": self.turn,
            "each": self.each,
            "block_rounds": self.block_rounds,
            "lost": self.lost,
            "unsupported": self.unsupported,
            "foreign_claims": self.foreign_claims,
            "schedules": self.schedules,
            "contradictions": self.contradictions,
            "seconds": [self.decoding_s, self.scoring_s],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state of the same audit."""
        for regime in self.regimes:
            regime.drafted, regime.accepted, regime.rejected = state["regimes"][regime.name]
        for regime_name, number, seed, output in state["outputs"]:
            self.seeds[regime_name, number] = seed
            self.outputs[regime_name, number] = tuple(output)
        tests = state["tests"]
        self.e_process = EProcess.resume(tests["e-process"])
        prompts = self.subject.prompts
        earlier = (((name, prompts[i % len(prompts)]), text) for (name, i), text in self.outputs.items())
        self.collisions.restore(tests["collisions"], earlier)
        self.acceptance.restore(tests["acceptance"])
        self.proposals.restore(tests["proposals"])
        self.traces = TraceRecorder.resume(state["traces"])
        self.numbers = dict(state["numbers"])
        self.turn, self.each = state["turn"], state["each"]
        self.block_rounds = state["block_rounds"]
        self.lost, self.unsupported = state["lost"], state["unsupported"]
        self.foreign_claims, self.schedules = state["foreign_claims"], state["schedules"]
        self.contradictions = list(state["contradictions"])
        self.decoding_s, self.scoring_s = state["seconds"]

    @property
    def _has_alarm(self) -> bool:
        """Whether to stop: more tokens would change no verdict."""
        if self.e_process.is_rejected or not self.strategy.lossless:
            return self.e_process.is_rejected
        mixtures = (self.acceptance.mixture, self.proposals.mixture, self.collisions.mixture)
        return self.unsupported > 0 or any(mixture.alarm for mixture in mixtures)

    def draw_from(self, regime: Regime) -> None:
        """Decode and judge the next sequences of a regime."""
        num = self.each
        first = self.numbers[regime.name]
        self.numbers[regime.name] += num
        stream = sorted(self.subject.scales).index(regime.name) + 1 if regime.name != OWN else 0
        requests = []
        for number in range(first, first + num):
            prompt = self.subject.prompts[number % len(self.subject.prompts)]
            seed = derived_seed(self.subject.seed, stream, number)
            sampling = replace(self.subject.sampling, seed=seed, max_new_tokens=OUTPUT_TOKENS)
            requests.append(Request(number, prompt, sampling, f"audit-{number}"))
            self.seeds[regime.name, number] = seed
        # Requests with equal prompts side by side share a prefill; the order of judging is by number.
        requests.sort(key=lambda request: request.id % len(self.subject.prompts))
        began = time.perf_counter()
        found = self.serve(regime, requests)
        regime.count(entry for sequence in found for entry in sequence.rounds)
        drawn = time.perf_counter()
        self.decoding_s += drawn - began
        scored, plan = self._scored(regime, found)
        self.e_process.foresee(regime.name, plan)
        for place in sorted(scored):
            self._judge(regime, found[place], scored[place])
        self.scoring_s += time.perf_counter() - drawn

    def serve(self, regime: Regime, requests: Sequence[Request]) -> list[Served]:
        """Decode requests in one regime; return them in the order of their ids."""
        engine = self.subject.engine
        engine.open(self.name, alter=regime.alter)
        records: dict[int, RequestRecord] = {}
        steps: list[StepRecord] = []
        rounds: dict[int, list[RoundRecord]] = {request.id: [] for request in requests}
        rows = min(engine.rows, self.subject.rows)
        lively = self.strategy.policy.lively_batch
        if self.speculates and lively is not None:
            rows = min(rows, lively)
        schedule = Schedule(tuple(requests), concurrency=rows, share_prefill=True, record_drafts=True)
        for event in engine.serve(schedule):
            if isinstance(event, Finished):
                records[event.record.request] = event.record
            elif isinstance(event, Stepped):
                steps.append(event.step)
                for entry in event.rounds:
                    rounds[entry.request].append(entry)
        self._hold_to_identities(steps, rounds, records)
        self.lost += sum(r.id not in records or records[r.id].error is not None for r in requests)
        return [
            Served(request.id, request.prompt, records[request.id], tuple(rounds[request.id]))
            for request in sorted(requests, key=lambda r: r.id)
            if request.id in records
        ]

    def _hold_to_identities(
        self,
        steps: Sequence[StepRecord],
        rounds: Mapping[int, Sequence[RoundRecord]],
        records: Mapping[int, RequestRecord],
    ) -> None:
        """Note where the records of one schedule contradict themselves (METRICS.md, identities)."""
        key = CellKey("audit", self.subject.sampling.temperature, "closed", self.name)
        in_order = sorted(
            (r for listed in rounds.values() for r in listed), key=lambda r: (r.step, r.request)
        )
        finished = max((record.finished for record in records.values()), default=0.0)
        serving = Serving(key, 0, 0, tuple(steps), tuple(in_order), tuple(records.values()), finished)
        self.schedules += 1
        try:
            identities.enforce(CellRecords(key, (serving,)))
        except IdentityViolation as violation:
            self.contradictions.append(violation.message)
            return
        eos_ids = self.subject.engine.eos_ids
        found = record_checks.contradictions(steps, rounds, records, eos_ids)
        self.contradictions += found[:1]

    def _scored(self, regime: Regime, found: Sequence[Served]) -> tuple[dict[int, _Scored], Plan]:
        """Score whole sequences, one forward for many of one prompt; return what is kept of each, by place.

        And what contexts of theirs could have shown: one in so many rows, whatever text it belongs to.
        """
        texts = [(sequence.prompt, sequence.record.output_tokens) for sequence in found]
        alternatives, every = self.e_process.alternatives(regime.name), self.e_process.plan_every
        scored: dict[int, _Scored] = {}
        pending: list[_Laws] = []
        planned: list[tuple[Tensor, Tensor | None]] = []
        plan = alternatives.empty_plan()
        rows = 0
        for place, logits in self.oracle.along(texts):
            p = self.oracle.law(logits, *texts[place]).cpu()
            q = None if regime.law is None else regime.law.laws(*texts[place], logits, p).cpu()
            pending.append((place, p, q))
            first = -rows % every
            planned.append((p[first::every].clone(), None if q is None else q[first::every].clone()))
            rows += len(p)
            if sum(law.numel() for _, law, _ in pending) >= SCORED_VALUES:
                scored |= self._score(regime, found, pending)
                pending = []
            if sum(law.numel() for law, _ in planned) >= SCORED_VALUES:
                plan, planned = plan + _planned(alternatives, planned), []
        scored |= self._score(regime, found, pending)
        return scored, plan + _planned(alternatives, planned)

    def _score(self, regime: Regime, found: Sequence[Served], pending: Sequence[_Laws]) -> dict[int, _Scored]:
        """Score some sequences, given their laws, in one go; return what is kept of each, by place."""
        if not pending:
            return {}
        p = together([law for _, law, _ in pending])
        q = together([law for _, _, law in pending if law is not None]) if regime.law is not None else None
        tokens = torch.tensor([t for place, _, _ in pending for t in found[place].record.output_tokens])
        scores = self.e_process.alternatives(regime.name).score(p, tokens, q)
        chosen = p.gather(1, tokens[:, None]).squeeze(1).log()
        claims = self._claims(regime, found, pending, q)
        kept: dict[int, _Scored] = {}
        start = 0
        for place, own_p, own_q in pending:
            sequence = found[place]
            stop = start + len(own_p)
            log_p = min(0.0, float(chosen[start:stop].sum()))
            coins = _tested(
                sequence.rounds, sequence.record.output_tokens, own_p, own_q, self.strategy.rule.name
            )
            pit = randomised_pit(own_p, tokens[start:stop], self.seeds[regime.name, sequence.number])
            scored = scores.take(slice(start, stop))
            kept[place] = _Scored(scored, log_p, coins, claims.get(place), pit)
            start = stop
        return kept

    def _claims(
        self, regime: Regime, found: Sequence[Served], pending: Sequence[_Laws], q: Tensor | None
    ) -> dict[int, tuple[Weighed, int]]:
        """Weigh drafted tokens against their laws q, together; return by place what is kept."""
        if q is None or not self._samples_drafts(regime):
            return {}
        rows: list[int] = []
        tokens: list[int] = []
        parts: dict[int, tuple[int, int, int]] = {}
        start = 0
        for place, _, own_q in pending:
            assert own_q is not None
            own_rows, own_tokens, foreign = _claims(found[place].rounds, own_q)
            parts[place] = len(tokens), len(tokens) + len(own_tokens), foreign
            rows += [start + row for row in own_rows]
            tokens += own_tokens
            start += len(own_q)
        weighed = self.proposals.weigh(q[rows].numpy(), tokens)
        return {place: (weighed.part(begin, end), foreign) for place, (begin, end, foreign) in parts.items()}

    def _samples_drafts(self, regime: Regime) -> bool:
        """Whether drafts are drawn at random from a law the auditor knows."""
        return regime.name != OWN or bool(self.strategy.drafter is not None and self.strategy.drafter.runners)

    def _judge(self, regime: Regime, sequence: Served, scored: _Scored) -> None:
        """Hand one sequence to every test, in order."""
        num = len(scored.scores)
        self.outputs[regime.name, sequence.number] = sequence.record.output_tokens
        self.unsupported += int((~scored.scores.supported).sum())
        if num:
            numbers = np.full(num, sequence.number)
            paths = self.e_process.update(regime.name, scored.scores, numbers, np.arange(num))
            self.traces.add(regime.name, paths, scored.pit)
        self.collisions.add((regime.name, sequence.prompt), sequence.record.output_tokens, scored.log_p)
        if not self.strategy.lossless:
            return
        if isinstance(self.acceptance, BlockAcceptance):
            self._judge_blocks(self.acceptance, sequence)
        elif scored.coins[0]:
            self.acceptance.add(*scored.coins)
        if scored.claims is not None:
            weighed, foreign = scored.claims
            self.foreign_claims += foreign
            if len(weighed.possible) and not self.foreign_claims:
                self.proposals.take(weighed)

    def _judge_blocks(self, acceptance: BlockAcceptance, sequence: Served) -> None:
        """Score the drafts of block verification themselves: one coin decides on tokens never emitted."""
        output, place = sequence.record.output_tokens, 0
        judged: list[RoundRecord] = []
        starts: list[int] = []
        for entry in sequence.rounds:
            if entry.draft_tokens and self.block_rounds < BLOCK_ROUNDS:
                self.block_rounds += 1
                judged.append(entry)
                starts.append(place)
            place += entry.emitted
        if not judged:
            return
        texts = [(*output[:start], *(e.draft_tokens or ())) for start, e in zip(starts, judged, strict=True)]
        expected = np.zeros(len(judged))
        for i, logits in self.oracle.rows(sequence.prompt, texts):
            drafted = texts[i][starts[i] :]
            law = self.oracle.law(logits[starts[i] :], sequence.prompt, texts[i], start=starts[i]).cpu()
            p = law.gather(1, torch.tensor(drafted)[:, None]).T.numpy()
            expected[i] = block_expectation(p, np.array([judged[i].draft_probs]), [len(drafted)])[0]
        lengths, offered = [e.accepted for e in judged], [len(e.draft_tokens or ()) for e in judged]
        acceptance.add(lengths, expected, offered)

    def _greedy(self) -> None:
        """Decode every prompt at temperature 0 in every regime, and compare the logits."""
        greedy = replace(self.subject.sampling, temperature=0.0, max_new_tokens=GREEDY_TOKENS)
        plain = Oracle(
            self.subject.engine.runner.model,
            replace(greedy, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
            self.subject.engine.eos_ids,
        )
        found: list[Served] = []
        for regime in self.regimes:
            requests = [
                Request(i, prompt, greedy, f"greedy-{i}") for i, prompt in enumerate(self.subject.prompts)
            ]
            served = self.serve(regime, requests)
            if regime.name == OWN:
                self.accepted_greedily = {s.prompt: sum(r.accepted for r in s.rounds) for s in served}
            found += served
        for values in greedy_regrets(plain, found):
            self.regret.add(values)

    # Other checks

    def check_logprobs(self) -> None:
        """Compare the log-probabilities that requests are told with those of the reference."""
        regime = self.regimes[0]
        asked = replace(
            self.subject.sampling, logprobs=LOGPROBS_LISTED, max_new_tokens=GREEDY_TOKENS, min_new_tokens=0
        )
        plain = Oracle(self.subject.engine.runner.model, SamplingParams(), self.subject.engine.eos_ids)
        wrong = tokens = 0
        for sampling in (asked, replace(asked, **LOGPROBS_UNDER)):
            processed = self.subject.oracle(sampling)
            requests = [
                Request(i, prompt, replace(sampling, seed=i), f"logprobs-{i}")
                for i, prompt in enumerate(self.subject.prompts)
            ]
            for sequence in self.serve(regime, requests):
                output = sequence.record.output_tokens
                tokens += len(output)
                for _, logits in plain.rows(sequence.prompt, [output]):
                    wrong += logprob_check.mistaken(
                        sequence.record.logprobs,
                        output,
                        logits.double().log_softmax(-1).cpu(),
                        processed.law(logits, sequence.prompt, output).log().cpu(),
                        LOGPROBS_LISTED,
                    )
        words = f"{wrong} of {tokens} tokens were given another log-probability than the reference's"
        self.logprobs = ComponentResult("logprobs", wrong > 0, float(wrong), "exact", 0.0, tokens, words)

    def probe_parameters(self) -> None:
        """Draw under parameters that were not asked for, with the own and a good draft; see the probe."""
        subject = self.subject
        texts = list(self.outputs.values())
        chosen = parameter_probe.settings(subject.sampling, texts, vocab=subject.engine.runner.vocab)
        self.parameters = parameter_probe.ParameterProbe(subject.level("support"), chosen)
        regimes = [regime for regime in self.regimes if regime.name in (OWN, "good")]
        each = math.ceil(parameter_probe.TOKENS / (len(regimes) * PROBE_TOKENS))
        plain = subject.oracle(SamplingParams())
        oracles = [subject.oracle(setting.sampling) for setting in chosen]
        for place, regime in enumerate(regimes):
            # All settings in one batch, row by row another: rows must not borrow from their neighbours.
            requests = []
            for number in range(each * len(chosen)):
                setting = chosen[number % len(chosen)]
                seed = derived_seed(subject.seed, setting.name, place, number)
                sampling = replace(setting.sampling, seed=seed, max_new_tokens=PROBE_TOKENS)
                prompt = subject.prompts[(number // len(chosen)) % len(subject.prompts)]
                requests.append(Request(number, prompt, sampling, f"parameters-{number}"))
            found = self.serve(regime, requests)
            drawn = [(sequence.prompt, sequence.record.output_tokens) for sequence in found]
            evidence: dict[int, parameter_probe.Evidence] = {}
            for index, logits in plain.along(drawn):  # the target's own, whatever they are sampled with
                which = found[index].number % len(chosen)
                prompt, output = drawn[index]
                weighed = self.parameters.weigh(chosen[which], prompt, output, logits, oracles[which])
                evidence[index] = weighed
            for index in sorted(evidence):
                self.parameters.add(evidence[index])
            if self.parameters.alarm:
                return

    def keep_contracts(self) -> tuple[contracts.ContractResult, ...]:
        """Try what every decoder owes its callers, with the strategy's own drafter."""
        return contracts.check(self.contract_subject())

    def contract_subject(self) -> contracts.Subject:
        """Return what is held to the contracts."""
        engine = self.subject.engine
        # Where most is accepted at temperature 0, if known: contracts need runs to end in the middle of.
        lively = self.accepted_greedily
        prompts = sorted(self.subject.prompts, key=lambda prompt: (-lively.get(prompt, 0), len(prompt)))
        drafts: dict[int, list[int]] = {}

        def generate(spec: str, alter: Alter, eos: Sequence[int] | None = None) -> contracts.Generate:
            def serve(requests: Sequence[Request]) -> list[RequestRecord]:
                before = engine.eos_ids
                engine.open(spec, alter=alter)
                if eos is not None:
                    engine.eos_ids = tuple(eos)
                try:
                    schedule = Schedule(tuple(requests), concurrency=min(engine.rows, CONTRACT_ROWS))
                    events = list(engine.serve(schedule))
                    drafts.clear()
                    for entry in (r for e in events if isinstance(e, Stepped) for r in e.rounds):
                        drafts.setdefault(entry.request, []).append(entry.drafted)
                    return [e.record for e in events if isinstance(e, Finished)]
                finally:
                    engine.eos_ids = before

            return serve

        return contracts.Subject(
            generate=generate(self.name, self.alter),
            prompts=tuple(prompts[:CONTRACT_PROMPTS]),
            max_draft=self.opened.max_draft,
            sampling=replace(self.subject.sampling, stop_strings=(), grammar=None, min_new_tokens=0),
            ordinary=generate("ordinary", lambda strategy: strategy),
            with_eos=lambda token: generate(self.name, self.alter, (token,)),
            repeats_ordinary=type(self.strategy.rule) is ExactMatch,
            counter_seeds=self.strategy.policy.lively_batch is None,
            text=engine.text if engine.tokenizer is not None else None,
            grammar=CONTRACT_GRAMMAR if engine.tokenizer is not None else None,
            parses=self._parses if engine.tokenizer is not None else None,
            eos_ids=engine.eos_ids,
            drafts=lambda: {number: tuple(counts) for number, counts in drafts.items()},
        )

    def _parses(self, output: Sequence[int]) -> bool:
        """Whether tokens are a text of the contract's grammar, or the beginning of one."""
        matcher = self.subject.engine.matcher(CONTRACT_GRAMMAR)
        return all(matcher.accept(token) for token in output)

    def chi_squared(self) -> ChiSquaredVerdict:
        """Compare whole continuations with their exact law."""
        subject = self.subject

        def oracle_for(horizon: int) -> Oracle:
            return subject.oracle(subject.chi_sampling(horizon, 0))

        return next(
            continuations.check(
                subject.engine,
                oracle_for,
                subject.chi_sampling,
                [self.name],
                subject.branch_prompts,
                alpha=subject.level("chi-squared"),
                seed=subject.seed + 1,
                dtype=subject.dtype,
                detectable_tv=subject.budget.continuation_tv,
                alter=self.alter,
            )
        )

    # The verdict

    def conclude(
        self,
        promised: tuple[contracts.ContractResult, ...],
        checked: ChiSquaredVerdict | None,
        controls: Sequence[Control],
        injected: str | None,
    ) -> AuditRecord:
        """Make one verdict of everything found."""
        found = self.e_process.result()
        if not self.speculates:
            controls = [*controls, Control("ordinary decoding", False, found.is_rejected)]
        detectable = {name: d.hidden for name, d in found.detectable.items() if d is not None}
        components = [self._e_component(found), *self._companions(), contracts.component(promised)]
        if checked is not None:
            components.append(chi_squared_component(checked))
        speculation = Speculation(
            sum(regime.drafted for regime in self.regimes),
            sum(regime.accepted for regime in self.regimes),
            sum(regime.rejected for regime in self.regimes),
        )
        conclusion: Conclusion = combine(
            components,
            alpha=RUN_ALPHA / self.subject.strategies,
            claims_lossless=self.opened.lossless,
            speculates=self.speculates,
            speculation=speculation,
            controls=controls,
            smallest_detectable=detectable,
            promised_tv=self.subject.budget.promised_tv,
            lost=self.lost,
        )
        return AuditRecord(
            strategy=self.name,
            verdict=conclusion.verdict,
            reasons=conclusion.reasons,
            components=tuple(components),
            budget=self.subject.budget.name,
            promised_tv=self.subject.budget.promised_tv,
            tokens=found.tokens,
            sequences=sum(regime.sequences for regime in found.regimes),
            prompts=len(self.subject.prompts),
            dtype=self.subject.dtype,
            alpha=sum(component.alpha for component in components),
            log_e=found.log_supremum,
            bar=-math.log(found.alpha),
            tokens_at_alarm=found.tokens_at_alarm,
            family=found.best_family,
            alternative=found.best_alternative,
            regime=found.best_regime,
            effect=self._effect(found),
            detectable=detectable,
            acceptance={
                regime.name: regime.accepted / (regime.accepted + regime.rejected) if regime.drafted else None
                for regime in self.regimes
            },
            drafted=speculation.drafted,
            accepted=speculation.accepted,
            rejected=speculation.rejected,
            contracts_held=sum(result.held is True for result in promised),
            contracts_tried=sum(result.held is not None for result in promised),
            chi_squared=checked,
            lossless_claimed=self.opened.lossless,
            seconds={},
            worst=self._worst(found),
            injected=injected,
            traces=self.traces.result(),
        )

    def _effect(self, found: EProcessResult) -> EffectRecord | None:
        effect = next(r for r in found.regimes if r.regime == found.best_regime).effect
        return EffectRecord(effect.direction, effect.tv, effect.low, effect.high) if effect else None

    def _e_component(self, found: EProcessResult) -> ComponentResult:
        if found.unsupported and self.opened.lossless:
            words = f"{found.unsupported} of {found.tokens} tokens are ones the target cannot emit there"
            return ComponentResult(
                "support", True, float(found.unsupported), "exact", 0.0, found.tokens, words
            )
        return found.component()

    def identities_component(self) -> ComponentResult:
        """Return whether the records of every schedule so far were consistent."""
        found = len(self.contradictions)
        words = f"the records of {self.schedules} schedules are consistent"
        if found:
            words = f"{found} of {self.schedules} schedules: {self.contradictions[0]}"
        return ComponentResult("identities", found > 0, float(found), "exact", 0.0, 0, words)

    def _companions(self) -> list[ComponentResult]:
        results = [self.identities_component()]
        results.append(self.collisions.result())
        if self.logprobs is not None:
            results.append(self.logprobs)
        if self.parameters is not None:
            results += self.parameters.results()
        if self.regret.mixture.steps:
            results.append(self.regret.result())
        if self.strategy.lossless and self.speculates:
            if self.acceptance.mixture.steps:
                results.append(self.acceptance.result())
            if self.foreign_claims:
                words = (
                    f"{self.foreign_claims} draft tokens claim another q than the draft has along the text: "
                    "it reads something else (stale state, other tokens), which costs acceptance"
                )
                level = self.proposals.mixture.alpha
                results.append(
                    ComponentResult("proposals", False, None, "log e", level, 0, words, conclusive=False)
                )
            elif self.proposals.tokens:
                results.append(self.proposals.result())
        return results

    def _worst(self, found: EProcessResult) -> Place | None:
        if not found.is_rejected:
            return None
        regime = next(r for r in found.regimes if r.regime == found.best_regime)
        if regime.worst is None:
            return None
        key = regime.regime, regime.worst.sequence
        return Place(
            regime=regime.regime,
            prompt=self.subject.prompts[regime.worst.sequence % len(self.subject.prompts)],
            seed=self.seeds[key],
            offset=regime.worst.offset,
            token=self.outputs[key][regime.worst.offset],
            log_factor=regime.worst.log_factor,
            alternative=regime.best_alternative,
        )


def greedy_regrets(plain: Oracle, found: Sequence[Served]) -> list[np.ndarray[Any, Any]]:
    """Return the regrets of the tokens of outputs at temperature 0, in order; none of an empty output.

    Outputs of different regimes are equal unless something is wrong, so each is scored once.

    Args:
        plain: The reference of the sampling at temperature 1.
        found: What was emitted.
    """
    texts = list(dict.fromkeys((served.prompt, served.record.output_tokens) for served in found))
    values: dict[tuple[tuple[int, ...], tuple[int, ...]], np.ndarray[Any, Any]] = {}
    for place, logits in plain.along(texts):
        scores = plain.law(logits, *texts[place]).log().cpu().numpy()
        values[texts[place]] = np.minimum(regrets(scores, np.array(texts[place][1])), LARGEST_REGRET)
    every = ((served.prompt, served.record.output_tokens) for served in found)
    return [values[text] for text in every if text in values]


def _planned(alternatives: Alternatives, contexts: Sequence[tuple[Tensor, Tensor | None]]) -> Plan:
    """Return what contexts could have shown, together: one at a time they take far longer."""
    if not contexts:
        return alternatives.empty_plan()
    drafts = [q for _, q in contexts if q is not None]
    return alternatives.plan(torch.cat([p for p, _ in contexts]), torch.cat(drafts) if drafts else None)


def together(laws: Sequence[Tensor]) -> Tensor:
    """Return laws of several sequences as one, without a copy if there is one."""
    return laws[0] if len(laws) == 1 else torch.cat(list(laws))


def _tested(
    rounds: Sequence[RoundRecord], output: Sequence[int], p: Tensor, q: Tensor | None, rule: str
) -> Coins:
    """Return the coins that were thrown for one sequence, in order.

    Tested are the positions up to and including the first rejection; their p is that of the emitted text,
    which up to there is the drafted one. In a tree siblings are tested in turn. What lies behind an EOS or
    the budget was not scored. Block verification throws one coin for many tokens: see `_judge_blocks`.
    """
    coins: Coins = ([], [], [])
    place = 0
    for entry in rounds if rule in ("rejection", "exact") else ():
        if entry.draft_parents is not None:
            _tree_coins(entry, output, place, p, q, coins, is_exact=rule == "exact")
        else:
            tokens, claimed = entry.draft_tokens or (), entry.draft_probs or ()
            # Records that count more than was offered are for the identities to find.
            for i in range(min(entry.accepted + entry.rejected, len(tokens), len(output) - place)):
                coins[0].append(i < entry.accepted)
                coins[1].append(float(p[place + i, tokens[i]]))
                coins[2].append(1.0 if rule == "exact" else claimed[i])
        place += entry.emitted
    return coins


def _tree_coins(
    entry: RoundRecord,
    output: Sequence[int],
    start: int,
    p: Tensor,
    q: Tensor | None,
    coins: Coins,
    *,
    is_exact: bool,
) -> None:
    """Follow the accepted path of a tree; at each node its children are tested until one is taken.

    After a refusal p' is what p' has beyond q', and q' loses the token: SpecInfer 2305.09781. Where the
    draft was certain, or the rule compares samples, p' only loses the token.
    """
    tokens, claimed, parents = entry.draft_tokens or (), entry.draft_probs or (), entry.draft_parents or ()
    node = -1
    for depth in range(min(entry.draft_depth, len(output) - start)):
        left = p[start + depth].clone()
        draft = q[start + depth].clone() if q is not None else None
        taken = None
        for child in (n for n, parent in enumerate(parents) if parent == node):
            token = tokens[child]
            is_certain = is_exact or draft is None or claimed[child] == 1.0
            kept = depth < entry.accepted and output[start + depth] == token
            coins[0].append(kept)
            coins[1].append(min(1.0, float(left[token])))
            coins[2].append(1.0 if is_certain or draft is None else float(draft[token]))
            if kept:
                taken = child
                break
            left = _without(left, token) if is_certain or draft is None else (left - draft).clamp_min(0.0)
            left = left / left.sum().clamp_min(1e-300)
            if draft is not None:
                draft = _without(draft, token)
        if taken is None:
            return
        node = taken


def _without(law: Tensor, token: int) -> Tensor:
    """Return a law given that it is not this token; all zeros if nothing else is possible."""
    rest = law.clone()
    rest[token] = 0.0
    return rest / rest.sum().clamp_min(1e-300)


def _claims(rounds: Sequence[RoundRecord], q: Tensor) -> tuple[list[int], list[int], int]:
    """Return the rows of q and the tokens of the drafts of chains that were tested, in order.

    And how many of them claim another probability than the draft gives along the text. There the draft did
    not read this text (its cache is stale, its vocabulary another): what it drew from is then not known
    here, and that it drew from what it claims cannot be tested. Such a draft costs acceptance only.
    """
    rows: list[int] = []
    tokens: list[int] = []
    foreign = 0
    place = 0
    for entry in rounds:
        drafted, claimed = entry.draft_tokens or (), entry.draft_probs or ()
        if entry.draft_parents is None:
            for i in range(min(entry.accepted + entry.rejected, len(drafted), len(q) - place)):
                rows.append(place + i)
                tokens.append(drafted[i])
                foreign += abs(claimed[i] - float(q[place + i, drafted[i]])) > CLAIM_TOLERANCE
        place += entry.emitted
    return rows, tokens, foreign
