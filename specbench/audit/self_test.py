"""Does the audit notice what it should, and nothing else? Every fault and every innocent variant, on a toy.

The toy is a random two-layer model with a vocabulary of 48, through the real engine: seconds per case.
What needs text (grammars, stop strings) is tried on the bundled pair. An audit depends on its case and seed
alone, not on what was audited before it; `bench.self_test` carries many out.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from specbench import registry
from specbench.audit import faults, session
from specbench.audit.budget import Budget, Control
from specbench.audit.reference import Oracle
from specbench.audit.session import Subject
from specbench.audit.verdicts import AuditRecord
from specbench.engines.local import LocalEngine
from specbench.records import SamplingParams, derived_seed

VOCAB = 48
CONTEXT = 128
PROMPTS = (
    (3, 1, 4, 1, 5, 9, 2, 6, 5, 3),
    (2, 7, 1),
    (7, 7, 8, 9, 3, 7, 7, 8, 9, 3, 7, 7),
    (16, 0, 16, 4),
    (40, 41, 42, 40, 41, 42, 40),
)
TOKENS = 6_000
"""Scored tokens after which a fault that nothing has noticed is missed."""
UNSAMPLED_TOKENS = 1_000
"""As many where a fault shows in no emitted token, but in contracts, records or log-probabilities."""
TEXT_TOKENS = 200
"""As many on the bundled pair, whose cases are all for the contracts."""
STRATEGIES = 1

Expected = Literal["caught", "acceptance only", "too small", "innocent"]

INNOCENT = (
    "ordinary",
    "draft:k=3",
    "draft:k=3,verify=exact",
    "draft:k=3,verify=block",
    "draft:topk=2,depth=3",
    "draft:topk=2,depth=3,verify=exact",
    "draft:k=4,policy=ema(warmup=2,interval=2)",
    "draft:k=4,policy=confidence",
    "ngram:k=3,min=1",
    "suffix:k=3,nodes=6,factor=4",
    "early-exit:layers=1,k=2",
)
"""Lossless, and often accused: they must not alarm."""

DRAFT, TREE, NGRAM = "draft:k=3", "draft:topk=2,depth=3", "ngram:k=3,min=1"
STRATEGY_OF = {
    "sampled-tree-pruned": TREE,
    "tree-path-not-compacted": TREE,
    "tree-mask-sees-siblings": TREE,
    "state-stale-after-idle-step": NGRAM,
    "idle-rounds-dropped": NGRAM,
    "padding-rows-counted": NGRAM,
}
"""What a fault is planted in, where it has nothing to break in a chain of drafts."""

SAMPLING_OF: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("temperature", {"temperature": 0.5}),
    ("top-k", {"top_k": 2}),
    ("top-p-before-top-k", {"top_k": 4, "top_p": 0.7}),
    ("top-p", {"top_p": 0.6}),
    ("min-p", {"min_p": 0.3}),
    ("repetition-penalty", {"repetition_penalty": 2.0}),
    ("presence-penalty", {"presence_penalty": 1.5, "frequency_penalty": 1.0}),
    ("penalties-see", {"frequency_penalty": 1.5}),
    ("penalties-count", {"frequency_penalty": 1.5}),
    ("logit-bias-after", {"temperature": 0.6, "logit_bias": ((4, -2.5), (9, 2.0), (7, -2.5))}),
    ("logit-bias", {"logit_bias": ((4, -100.0), (9, 1.5), (7, -1.5))}),
    ("bad-words", {"bad_words": ((4,), (9, 3), (7,))}),
    ("q-of-raw-logits", {"temperature": 0.7, "top_k": 4}),
)
"""Parameters that a fault needs in order to show, by the beginning of its name."""

SEQUENTIAL = ("e-process", "support", "acceptance", "proposals", "collisions")
"""Tests that look at every sequence, and stop the audit at their alarm."""
NEEDS_TEXT = ("grammar", "drafts-kept", "stop-string")
CONTRACT_SHOWS = frozenset({"contract", "logprobs"})
UNSAMPLED_SHOWS = CONTRACT_SHOWS | {"identities"}


@dataclass(frozen=True, slots=True)
class Case:
    """One decoder to audit. `fault` is None for an innocent one."""

    fault: str | None
    strategy: str
    group: str
    expected: Expected
    sampling: Mapping[str, Any]
    needs_text: bool
    needs_contracts: bool
    tokens: int = TOKENS

    @property
    def name(self) -> str:
        """Return the fault, or the strategy of an innocent case."""
        return self.fault or self.strategy


@dataclass(frozen=True, slots=True)
class Job:
    """A case under one seed."""

    case: Case
    seed: int

    def __str__(self) -> str:
        """Name it in a message."""
        return f"{self.case.name}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Result:
    """What one audit of a case found, as it is stored.

    `by` are the tests that alarmed. `tokens` were scored when the e-process did or, where it did not, at the
    end of the batch in which another test that looks at every sequence did; None where neither did. `tv`,
    `alternative` and `regime` are the e-process's, where it alarmed: the effect per token in the best-fitting
    direction, in the draft regime with the most evidence.
    """

    case: str
    seed: int
    by: tuple[str, ...]
    tokens: int | None
    tv: float | None
    alternative: str | None
    regime: str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case over its seeds.

    `caught` of `seeds` alarmed; `by` are the tests that did, most often first. `tokens` is the median and
    `tokens_range` the least and the most over the seeds whose `Result.tokens` is known, `tv` the median over
    those whose `Result.tv` is, `alternative` and `regime` are the most frequent; None where there is none.
    """

    case: str
    group: str
    strategy: str
    expected: Expected
    caught: int
    seeds: int
    by: tuple[str, ...]
    tokens: float | None
    tokens_range: tuple[int, int] | None
    tv: float | None
    alternative: str | None
    regime: str | None

    @property
    def is_right(self) -> bool:
        """Whether this is what must be; a fault too small for samples may go either way."""
        if self.expected == "caught":
            return self.caught == self.seeds
        return self.expected == "too small" or self.caught == 0


def cases(only: Sequence[str] = ()) -> list[Case]:
    """List every fault by class, then the innocent; `only` keeps those named."""
    return [case for case in _all_cases() if not only or case.name in only]


@functools.cache  # looking up so many faults takes half a second
def _all_cases() -> Sequence[Case]:
    found = []
    for name in registry.names("fault"):
        group, shows = _described(name)
        expected: Expected = "caught" if shows else "acceptance only"
        if shows == ("unit tests",):
            expected = "too small"
        text = name.startswith(NEEDS_TEXT)
        found.append(
            Case(
                fault=name,
                strategy=STRATEGY_OF.get(name, DRAFT),
                group=group,
                expected=expected,
                sampling=next((s for start, s in SAMPLING_OF if name.startswith(start)), {}),
                needs_text=text,
                needs_contracts=text or not CONTRACT_SHOWS.isdisjoint(shows),
                tokens=TEXT_TOKENS if text else UNSAMPLED_TOKENS if _is_unsampled(shows) else TOKENS,
            )
        )
    order = list(_classes())
    found.sort(key=lambda case: order.index(case.group) if case.group in order else len(order))
    found += [Case(None, spec, "innocent", "innocent", {}, False, True) for spec in INNOCENT]
    return found


def _described(name: str) -> tuple[str, tuple[str, ...]]:
    module = registry.module("fault", name)
    return str(getattr(module, "CLASS", "other")), tuple(getattr(module, "SHOWS", ("good",)))


def _is_unsampled(shows: Sequence[str]) -> bool:
    """Whether a fault shows, but not in the law of emitted tokens."""
    return bool(shows) and UNSAMPLED_SHOWS.issuperset(shows)


def _classes() -> Sequence[str]:
    return get_args(faults.FaultClass)


class Bench:
    """The toy and, where it is needed, the bundled pair; made once, for many audits."""

    def __init__(self) -> None:
        with _one_thread():
            self.toy = _toy_engine()
        self._pair: LocalEngine | None = None
        self._scales: dict[tuple[bool, tuple[tuple[str, Any], ...]], dict[str, float]] = {}

    def __call__(self, job: Job) -> Result:
        """Audit a case under a seed."""
        with _one_thread():
            return _result(job, self._audited(job))

    def _audited(self, job: Job) -> AuditRecord:
        case = job.case
        return session.audit(
            self.subject(job),
            case.strategy,
            alter=None if case.fault is None else registry.module("fault", case.fault).alter,
            injected=case.fault,
            controls=[Control("accept-all", expected_alarm=True, alarm=True), Control("A/A", False, False)],
            sequences_only=not case.needs_contracts,
        )

    @property
    def pair(self) -> LocalEngine:
        """Return an engine on the bundled pair."""
        if self._pair is None:
            from specbench import models

            target, draft = (models.load(models.resolve(n), dtype="float32") for n in ("tiny", "tiny-draft"))
            self._pair = LocalEngine(
                target.model,
                eos_ids=target.eos_token_ids,
                draft=draft.model,
                tokenizer=target.tokenizer,
                rows=32,
                width=CONTEXT,
            )
        return self._pair

    def subject(self, job: Job) -> Subject:
        """Return what a case is audited on."""
        case = job.case
        engine = self.pair if case.needs_text else self.toy
        sampling = SamplingParams(**case.sampling)
        key = (case.needs_text, tuple(sorted(case.sampling.items())))
        if key not in self._scales:
            oracle = Oracle(engine.runner.model, sampling)
            self._scales[key] = session.calibrate_regimes(oracle, PROMPTS)
        return Subject(
            engine=engine,
            sampling=sampling,
            prompts=PROMPTS,
            branch_prompts=(),
            budget=Budget("self-test", case.tokens, 1.0),
            strategies=STRATEGIES,
            # By name: equal strategies with and without a fault are not to see equal random numbers.
            seed=derived_seed(case.name, job.seed),
            dtype="float32",
            scales=self._scales[key],
        )


def _toy_engine() -> LocalEngine:
    """Return an engine on a random model and a draft that is right about two times in three."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        target = LlamaForCausalLM(config).eval().requires_grad_(False)
        for name, parameter in target.named_parameters():
            if "embed" in name:
                parameter.normal_(0, 0.7)
            elif parameter.dim() > 1:
                parameter.mul_(6.0)
        target.get_output_embeddings().weight.normal_(0, 0.4)
        draft = LlamaForCausalLM(config).eval().requires_grad_(False)
        draft.load_state_dict(target.state_dict())
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.2 * float(parameter.std()) * torch.randn(parameter.shape))
    return LocalEngine(target, eos_ids=(11,), draft=draft, rows=32, width=CONTEXT)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Models this small gain nothing from more threads, and sums come out alike wherever it runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _result(job: Job, record: AuditRecord) -> Result:
    by = tuple(component.name for component in record.components if component.alarm)
    is_found = record.tokens_at_alarm is not None
    return Result(
        case=job.case.name,
        seed=job.seed,
        by=by,
        tokens=(record.tokens_at_alarm or record.tokens) if set(by) & set(SEQUENTIAL) else None,
        tv=record.effect.tv if is_found and record.effect is not None else None,
        alternative=record.alternative if is_found else None,
        regime=record.regime if is_found else None,
    )


def outcome(case: Case, results: Sequence[Result]) -> Outcome:
    """Sum up the audits of one case, of which there is at least one."""
    alarms = Counter(name for result in results for name in result.by)
    tokens = [result.tokens for result in results if result.tokens is not None]
    effects = [result.tv for result in results if result.tv is not None]
    return Outcome(
        case=case.name,
        group=case.group,
        strategy=case.strategy,
        expected=case.expected,
        caught=sum(bool(result.by) for result in results),
        seeds=len(results),
        by=tuple(sorted(alarms, key=lambda name: (-alarms[name], name))),
        tokens=statistics.median(tokens) if tokens else None,
        tokens_range=(min(tokens), max(tokens)) if tokens else None,
        tv=statistics.median(effects) if effects else None,
        alternative=_most_frequent(result.alternative for result in results),
        regime=_most_frequent(result.regime for result in results),
    )


def _most_frequent(names: Iterable[str | None]) -> str | None:
    counted = Counter(name for name in names if name is not None)
    return min(counted, key=lambda name: (-counted[name], name), default=None)
