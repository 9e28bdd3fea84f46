"""Carrying out audits: load, calibrate, audit strategy by strategy, store each verdict as it is reached.

Knows which texts are audited by default and where the results lie; `audit.session` does the judging.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench import environment, registry, workloads
from specbench.audit.budget import budget_named
from specbench.audit.verdicts import AuditRecord, Place
from specbench.bench.config import BASELINE, RunConfig, digest_of
from specbench.bench.loading import (
    Models,
    Progress,
    alteration,
    check_writable,
    encoder,
    load_models,
    local_engine,
)
from specbench.bench.sampling import Encode, build_sampling, parse_sampling
from specbench.bench.store import rebuild, replace_file
from specbench.errors import NotMeasured, UsageError
from specbench.models import require_dtype
from specbench.records import SCHEMA_VERSION, SamplingParams, read_document

if TYPE_CHECKING:
    from specbench.audit.budget import Control
    from specbench.audit.session import Subject
    from specbench.models import LoadedModel

KIND = "audit"
ROWS = 64
MARGIN = 96
"""Slots beyond the longest prompt: an output and the longest draft."""
CONTROL_FAULT = "accept-all"
LONGEST_PROMPT = 96
"""Longer prompts of a workload are cut at the front: every scored sequence pays for its prompt."""
MOST_PROMPTS = 16
SAVE_EVERY_S = 5.0
"""The most that an interruption costs, beside the batch under way."""

PROMPTS = (
    "Shopping list: apples, pears, plums, apples, pears, figs, apples, pears,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef",
    "The cat sat on the mat. The dog sat on the rug. The cat sat on the",
    "Return the number of items in the list, or None if",
    "import os\nimport sys\n\n",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y",
    "It was late in the evening when the train finally",
    "for i in range(10):\n    print(i)\n\nfor",
)
"""Texts to go on from: some repeat themselves, so that a drafter that copies has something to offer."""


AUDITED = {
    "tiny": (
        "ngram:k=4",
        "suffix:k=6",
        "suffix:k=4,nodes=8,factor=4",
        "early-exit:layers=2,k=2",
        "draft:k=3",
        "draft:k=3,verify=exact",
        "draft:k=3,verify=block",
        "draft:topk=2,depth=3",
        "draft:k=4,policy=ema",
        "draft:k=4,policy=confidence",
    ),
    "smollm2": ("ngram:k=4", "suffix:k=6", "early-exit:layers=8,k=2"),
}
"""What is audited of the bundled models where nothing is asked for."""


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """What an audit is asked to do. `tokens` overrides the budget's; then a PASS is hardly within reach."""

    target: str
    draft: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    draft_device: str | None = None
    strategies: tuple[str, ...] = ()
    budget: str = "quick"
    tokens: int | None = None
    sampling: tuple[str, ...] = ()
    temperature: float = 1.0
    workload: str | None = None
    seed: int = 0
    inject: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be audited, before anything is loaded."""
        budget_named(self.budget)
        require_dtype(self.dtype)
        if self.tokens is not None and self.tokens < 1:
            raise UsageError(f"--tokens is {self.tokens}; expected 1 or more")
        if self.temperature <= 0:
            raise UsageError(
                f"--temperature is {self.temperature:g}; expected more than 0",
                hint="what is sampled is audited; temperature 0 is compared by itself as part of it",
            )
        parse_sampling(self.sampling)
        for text in self.strategies:
            registry.options("strategy", registry.parse(text))
        if self.inject is not None:
            registry.module("fault", self.inject)

    @property
    def arms(self) -> tuple[str, ...]:
        """Return the strategies as audited: ordinary decoding first, the A/A arm."""
        return (BASELINE, *(s for s in dict.fromkeys(self.strategies) if s != BASELINE))

    @property
    def digest(self) -> str:
        """Return a short hash that equal configurations share."""
        return digest_of(self)


@dataclass(frozen=True, slots=True)
class AuditDocument:
    """A stored audit."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    status: str
    records: tuple[AuditRecord, ...]

    @classmethod
    def open(cls, folder: Path) -> AuditDocument:
        """Read an audit; raises UsageError if there is none."""
        remedy = "name an audit's folder, or make one with `specbench audit`"
        stored = read_document(folder / "audit.json", "audit", kind=KIND, remedy=remedy)
        records = tuple(rebuild(AuditRecord, entry, "audit.json") for entry in stored["records"])
        return cls(folder, stored["config"], stored["environment"], stored["status"], records)

    def write(self) -> None:
        """Replace the stored document at once."""
        document = {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "status": self.status,
            "config": self.config,
            "environment": self.environment,
            "records": [asdict(record) for record in self.records],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(document, indent=1, ensure_ascii=False)
        replace_file(self.folder / "audit.json", (text + "\n").encode())


def run(
    config: AuditConfig, results: Path, progress: Progress, *, run_id: str | None, fresh: bool
) -> AuditDocument:
    """Carry out an audit, or continue the latest unfinished one that was asked the same.

    A strategy that was interrupted goes on from its last saved state, under other seeds: nothing that was
    seen is drawn again.
    """
    check_writable(results)
    document = _begin(config, results, run_id, fresh)
    attempt = int(document.config["attempts"])
    progress.say(f"audit {document.folder}")
    models = load_models(
        RunConfig(
            config.target,
            config.draft,
            device=config.device,
            draft_device=config.draft_device,
            strategies=config.arms,
        ),
        config.dtype,
        progress,
    )
    if models.target is None:
        raise NotMeasured("a simulated engine has no target to compare with")
    around = environment.fingerprint(models.loaded)
    _require_same(document, around)
    document = replace(document, environment=around)
    document.write()
    done = {record.strategy: record for record in document.records}
    try:
        underway = Underway(document.folder)
        for record in audits(config, models, progress, done=done, attempt=attempt, underway=underway):
            done[record.strategy] = record
            listed = tuple(done[name] for name in config.arms if name in done)
            document = replace(document, records=listed)
            document.write()
    except BaseException:
        replace(document, status="interrupted").write()
        raise
    document = replace(document, status="complete")
    document.write()
    underway.remove()
    return document


def _require_same(found: AuditDocument, around: Mapping[str, Any]) -> None:
    """Refuse to go on with other models or software than an audit began with."""
    if not found.environment:
        return
    before, now = found.environment, json.loads(json.dumps(around))
    for name in ("specbench", "torch", "transformers"):
        versions = [entry["versions"].get(name) for entry in (before, now)]
        if versions[0] != versions[1]:
            what = f"{name} {versions[0]}, this is {versions[1]}"
            break
    else:
        prints = [[model["fingerprint"] for model in entry["models"]] for entry in (before, now)]
        if prints[0] == prints[1]:
            return
        what = "other models"
    raise UsageError(
        f"{found.folder} was begun with {what}; an audit can only be continued as it began",
        hint="start anew with --fresh, or go on with what began it",
    )


def _begin(config: AuditConfig, results: Path, run_id: str | None, fresh: bool) -> AuditDocument:
    """Find the audit to continue, or make a new one."""
    described = json.loads(json.dumps(asdict(config)))
    if run_id is not None and (results / run_id / "audit.json").exists():
        if fresh:
            raise UsageError(
                f"{results / run_id} exists", hint="choose another --run-id, or leave out --fresh"
            )
        found = AuditDocument.open(results / run_id)
        if {k: v for k, v in found.config.items() if k != "attempts"} != described:
            raise UsageError(
                f"{found.folder} was asked something else; an audit can only be continued as it began",
                hint="choose another --run-id, or repeat its settings",
            )
        return _again(found)
    for folder in sorted(results.glob(f"*-audit-{config.digest}"), reverse=True) if not fresh else ():
        try:
            found = AuditDocument.open(folder)
        except UsageError:
            continue
        if found.status != "complete" and run_id is None:
            return _again(found)
    name = run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-audit-{config.digest}"
    return AuditDocument(results / name, {**described, "attempts": 0}, {}, "running", ())


def _again(found: AuditDocument) -> AuditDocument:
    config = {**found.config, "attempts": int(found.config["attempts"]) + 1}
    return replace(found, config=config, status="running")


class Underway:
    """The saved state of the strategy that is being audited, beside the stored audit."""

    def __init__(self, folder: Path, *, every_s: float = SAVE_EVERY_S) -> None:
        self.path = folder / "underway.json"
        self.every_s = every_s
        self._saved = -math.inf

    def load(self, strategy: str) -> dict[str, Any] | None:
        """Return the state saved of a strategy; None if none was."""
        if not self.path.exists():
            return None
        stored = read_document(
            self.path, "state", kind="audit state", remedy=f"remove {self.path} to begin this strategy again"
        )
        state: dict[str, Any] = stored["state"]
        return state if stored["strategy"] == strategy else None

    def save(self, strategy: str, state: Callable[[], dict[str, Any]]) -> None:
        """Replace what is stored, unless that was done a moment ago."""
        if time.monotonic() - self._saved < self.every_s:
            return
        document = {
            "kind": "audit state",
            "schema_version": SCHEMA_VERSION,
            "strategy": strategy,
            "state": state(),
        }
        replace_file(self.path, json.dumps(document).encode())
        self._saved = time.monotonic()

    def remove(self) -> None:
        """Forget it: its strategy is concluded."""
        self.path.unlink(missing_ok=True)


def audits(
    config: AuditConfig,
    models: Models,
    progress: Progress,
    *,
    done: dict[str, AuditRecord],
    attempt: int = 0,
    underway: Underway | None = None,
) -> Iterator[AuditRecord]:
    """Audit every strategy that is not done yet; yield each record as it is reached.

    With `underway` the state of an unfinished strategy is kept there, and taken up.
    """
    from specbench.audit.budget import Control

    assert models.target is not None
    missing = [name for name in config.arms if name not in done]
    if not missing:
        return
    progress.stage("audit: calibrating")
    subject = _subject(config, models, attempt)
    audit_one, control_of = _instruments(config, subject, progress)
    control = control_of(registry.module("fault", CONTROL_FAULT).alter, CONTROL_FAULT)
    for name in missing:
        controls: list[Control] = [control]
        if name != BASELINE:
            ordinary = done[BASELINE]
            controls.append(Control("ordinary decoding", False, ordinary.log_e >= ordinary.bar))
        progress.stage(f"audit: {name}", total=subject.budget.tokens)
        # In lower precision a strategy that was interrupted begins again.
        kept = _resumption(underway, name, progress) if underway and subject.dtype == "float32" else {}
        done[name] = audit_one(
            name,
            alter=alteration(config.inject),
            injected=config.inject if name != BASELINE else None,
            controls=controls,
            progress=lambda tokens: progress.advance(tokens),
            **kept,
        )
        yield done[name]


def _resumption(underway: Underway, name: str, progress: Progress) -> dict[str, Any]:
    """Return what makes `session.audit` go on where it was interrupted, and be ready for the next time."""
    from specbench.audit import session

    saved = underway.load(name)
    if saved is not None:
        progress.say(f"{name}: goes on after {session.tokens_in(saved)} tokens")
    return {"saved": saved, "save": partial(underway.save, name)}


def _instruments(
    config: AuditConfig, subject: Subject, progress: Progress
) -> tuple[Callable[..., AuditRecord], Callable[..., Control]]:
    """Return what audits one strategy, and what plants the control: exact ones, or those with a floor."""
    from specbench.audit import session

    if subject.dtype == "float32":
        return partial(session.audit, subject), partial(session.false_control, subject)
    from specbench.audit import lower_precision

    if dropped := lower_precision.left_out(subject.sampling):
        progress.say(
            f"in {subject.dtype} rounding moves what {', '.join(dropped)} cut off, so that cannot be judged; "
            "the audit samples without: audit in float32 to judge it"
        )
    progress.stage(f"audit: what {subject.dtype} does to ordinary decoding")
    instrument = lower_precision.Instrument(subject, config.arms)
    return partial(lower_precision.audit, instrument), partial(lower_precision.false_control, instrument)


def _subject(config: AuditConfig, models: Models, attempt: int) -> Subject:
    from specbench.audit import continuations, session
    from specbench.audit.reference import Oracle

    assert models.target is not None
    target = models.target
    asked = parse_sampling(config.sampling)
    encode = encoder(target)
    sampling = build_sampling(
        {name: value for name, value in asked.items() if name not in ("stop_strings", "grammar")},
        encode=encode,
        max_new_tokens=session.OUTPUT_TOKENS,
        temperature=config.temperature,
    )
    prompts = _prompts(config, target)
    branches = tuple(continuations.branch_prompts(target.tokenizer))
    longest = max(map(len, (*prompts, *branches)))
    engine = local_engine(models, rows=ROWS, width=longest + MARGIN)
    budget = budget_named(config.budget)
    if config.tokens is not None:
        budget = replace(budget, name=f"{config.tokens} tokens", tokens=config.tokens)
    oracle = Oracle(target.model, sampling, target.eos_token_ids)
    return session.Subject(
        engine=engine,
        sampling=sampling,
        prompts=prompts,
        branch_prompts=branches,
        budget=budget,
        strategies=len(config.arms),
        seed=config.seed + 1_000_003 * attempt,
        dtype=target.dtype,
        scales=session.calibrate_regimes(oracle, prompts),
        chi_sampling=continuation_sampling(asked, encode),
    )


def continuation_sampling(asked: dict[str, Any], encode: Encode) -> Callable[[int, int], SamplingParams]:
    """Return the sampling of the chi-squared check: what was asked for, among the most likely tokens."""
    from specbench.audit import continuations

    kept = {name: value for name, value in asked.items() if name not in ("top_k", "stop_strings", "grammar")}

    def sampling(horizon: int, seed: int = 0) -> SamplingParams:
        return build_sampling(
            kept,
            encode=encode,
            max_new_tokens=horizon,
            temperature=1.0,
            top_k=continuations.TOP_K,
            seed=seed,
        )

    return sampling


def _prompts(config: AuditConfig, target: LoadedModel) -> tuple[tuple[int, ...], ...]:
    """Return the audited prompts: a workload's, or the usual texts."""
    if config.workload is None:
        return tuple(tuple(target.tokenizer(text)["input_ids"]) for text in PROMPTS)
    chosen = workloads.load_many((config.workload,))[0]
    rendered = (prompt.render(target.tokenizer) for prompt in chosen.prompts[:MOST_PROMPTS])
    return tuple(tuple(tokens[-LONGEST_PROMPT:]) for tokens in rendered if tokens)


def outcome(records: Sequence[AuditRecord]) -> int:
    """Return the exit code: 1 if a strategy was caught, 3 if one could not be judged, else 0."""
    verdicts = {record.verdict for record in records}
    if "FAIL" in verdicts:
        return 1
    return 3 if "INCONCLUSIVE" in verdicts else 0


def write_worst(document: AuditDocument) -> list[Path]:
    """Write each worst position to a file that `replayed` reads; return the files."""
    written = []
    for number, record in enumerate(document.records):
        if record.worst is None:
            continue
        path = document.folder / f"worst-{number}.json"
        entry = {
            "kind": "position",
            "schema_version": SCHEMA_VERSION,
            "config": document.config,
            "strategy": record.strategy,
            "place": asdict(record.worst),
        }
        replace_file(path, (json.dumps(entry, indent=1) + "\n").encode())
        written.append(path)
    return written


def replayed(path: Path, progress: Progress) -> list[str]:
    """Decode the worst position of an audit again and say what the target would have done there.

    Raises:
        UsageError: the file is none, or the same seed no longer gives the same output.
    """
    from specbench.audit import session

    stored = read_document(path, "position", kind="position", remedy="name a worst-N.json of an audit")
    place = rebuild(Place, stored["place"], path.name)
    config = rebuild(AuditConfig, stored["config"], path.name)
    attempt = int(stored["config"]["attempts"])
    models = load_models(
        RunConfig(config.target, config.draft, strategies=config.arms), config.dtype, progress
    )
    subject = _subject(config, models, attempt)
    assert models.target is not None
    tokenizer = models.target.tokenizer
    strategy = stored["strategy"]
    alter = alteration(config.inject)
    view = session.look_again(subject, strategy, place, alter=alter)
    if view is None:
        raise UsageError(
            f"{path.name}: the request now gives another output, so the position is gone",
            hint="replay with the versions and models of the audit",
        )

    def shown(token: int) -> str:
        return repr(tokenizer.decode([token]))

    lines = [
        f"{strategy}, regime {place.regime}, seed {place.seed}, output token {place.offset}:",
        f"  after   …{tokenizer.decode([*place.prompt, *view.before])[-70:]!r}",
        f"  emitted {shown(place.token)}: p = {view.p:.3g}"
        + (f", the draft's q = {view.q:.3g}" if view.q is not None else ""),
        f"  adds {place.log_factor:.2f} to the evidence for {place.alternative}",
        "  the target's likeliest here:",
    ]
    lines += [f"    {shown(token)} {probability:.3g}" for token, probability in view.likeliest]
    return lines
