"""Model-free drafters against recorded outputs: what would they have drafted, and how much of it was right?

A drafter whose proposal depends on the text alone needs no model to be judged: walk a recorded output,
let it propose, keep the longest agreeing run, emit that and one more recorded token, go on. At temperature
0 every lossless rule accepts just this run, so the counts are those of a run. For sampled outputs they are
what exact-match verification accepts on this very sample; rejection sampling accepts a token that was not
drawn at random with the same probability, so there they are an estimate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specbench import registry
from specbench.bench.config import BASELINE
from specbench.errors import IncompatibleError, UsageError, did_you_mean
from specbench.metrics.acceptance import RoundCounts, count_rounds
from specbench.records import EndedBy, FinishReason, RequestRecord, RoundRecord, SamplingParams

if TYPE_CHECKING:
    from specbench.bench.store import RunStore
    from specbench.decoding.verification import Proposal
    from specbench.runtime.protocols import Strategy

MODEL_FREE = ("ngram", "suffix")
"""What is replayed unless something else is asked for."""

_ENDED_BY: dict[FinishReason, EndedBy] = {
    "eos": "eos", "stop": "stop", "length": "budget", "context": "budget",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recorded:
    """One output as it was; `budget` is the most tokens it might have had, `ended_by` what ended it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    budget: int
    ended_by: EndedBy

    @classmethod
    def of(cls, record: RequestRecord) -> Recorded:
        """Take a stored request; what ended at the end of its budget or context had no more."""
        ended_by = _ENDED_BY.get(record.finish_reason, "none")
        budget = record.sampling.max_new_tokens if ended_by != "budget" else len(record.output_tokens)
        return cls(record.prompt_tokens, record.output_tokens, budget, ended_by)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of one workload at one temperature; None where nobody said."""

    workload: str
    temperature: float | None
    recorded: tuple[Recorded, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one strategy did on some outputs. `workload` is None for all of them together."""

    strategy: str
    workload: str | None
    temperature: float | None
    outputs: int
    counts: RoundCounts


# Where outputs come from


def from_run(store: RunStore, workloads: Sequence[str] = ()) -> list[Outputs]:
    """Return the outputs of a run's baseline (else its first strategy), each workload at its first load.

    An answer that was given twice to the same prompt, in another repeat, is taken once: a drafter that
    remembers outputs would else be shown the solution.

    Raises:
        UsageError: no such workload, or no outputs.
    """
    document = store.document
    if document.config.get("engine") == "simulated":
        raise UsageError(
            f"run {document.run_id} was simulated: its outputs are made up",
            hint="replay a run that a model decoded",
        )
    cells = store.cells()
    known = list(dict.fromkeys(cell.key.workload for cell in cells))
    for name in workloads:
        if name not in known:
            raise UsageError(
                f"run {document.run_id} has no workload '{name}'{did_you_mean(name, known)}",
                hint=f"it has: {', '.join(known)}" if known else None,
            )
    arms = [cell.key.strategy for cell in cells]
    arm = BASELINE if BASELINE in arms else next(iter(arms), None)
    found: dict[tuple[str, float], Outputs] = {}
    for cell in cells:
        key = (cell.key.workload, cell.key.temperature)
        if cell.key.strategy != arm or key in found or (workloads and key[0] not in workloads):
            continue
        records = [record for serving in cell.servings for record in serving.requests]
        kept = [Recorded.of(record) for record in records if record.error is None and record.output_tokens]
        if kept:
            found[key] = Outputs(*key, _distinct(kept))
    if not found:
        raise UsageError(
            f"run {document.run_id} has no recorded outputs", hint="replay a run that served requests"
        )
    return list(found.values())


def _distinct(recorded: Iterable[Recorded]) -> tuple[Recorded, ...]:
    return tuple({(entry.prompt, entry.output): entry for entry in recorded}.values())


def from_jsonl(path: Path, workloads: Sequence[str] = ()) -> list[Outputs]:
    """Return the outputs of a JSON Lines file: `prompt` and `output` as token ids, one answer a line.

    `workload` (else the file's stem) and `temperature` may stand beside them; other keys are ignored.

    Raises:
        UsageError: the file cannot be read, or a line is not of this form.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"cannot read {path}: {reason}", hint="name a JSON Lines file, or a run") from None
    found: dict[tuple[str, float | None], list[Recorded]] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            key, recorded = _parsed(line, f"{path}, line {number}", path.stem)
            found.setdefault(key, []).append(recorded)
    known = list(dict.fromkeys(name for name, _ in found))
    for name in workloads:
        if name not in known:
            raise UsageError(f"{path} has no workload '{name}'{did_you_mean(name, known)}")
    chosen = [
        Outputs(*key, _distinct(entries))
        for key, entries in found.items()
        if not workloads or key[0] in workloads
    ]
    if not chosen:
        raise UsageError(f"{path} has no outputs", hint=_LINE)
    return chosen


_LINE = 'write one answer a line: {"prompt": [1, 2], "output": [3, 4]}'


def _parsed(line: str, where: str, stem: str) -> tuple[tuple[str, float | None], Recorded]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where}: not JSON", hint=_LINE) from None
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected an object", hint=_LINE)
    prompt, output = (_token_ids(value.get(name), where, name) for name in ("prompt", "output"))
    workload, temperature = value.get("workload", stem), value.get("temperature")
    if not isinstance(workload, str):
        raise UsageError(f"{where}: 'workload' is {workload!r:.40}; expected a name")
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if temperature is not None and not (is_number and 0 <= temperature < float("inf")):
        raise UsageError(f"{where}: 'temperature' is {temperature!r:.40}; expected a number, 0 or more")
    key = (workload, None if temperature is None else float(temperature))
    return key, Recorded(prompt, output, len(output), "budget")


def _token_ids(value: Any, where: str, name: str) -> tuple[int, ...]:
    ids = isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 63 for token in value)
    if not (ids and value):
        raise UsageError(f"{where}: '{name}' is {value!r:.40}; expected a list of token ids", hint=_LINE)
    return tuple(value)


# Replaying


class _NoModel:
    """What a strategy finds in the target's place: a device, and nothing else."""

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        raise IncompatibleError("no model is loaded")


def model_free(text: str) -> Strategy:
    """Build a strategy that drafts without a model.

    Raises:
        UsageError: no such strategy or option, or it needs a model.
    """
    from specbench.runtime.protocols import Resources
    from specbench.runtime.runner import ModelRunner

    spec = registry.parse(text)
    options = registry.options("strategy", spec)
    nothing = Resources(cast(ModelRunner, _NoModel()), draft_model=None, draft_weights=0, rows=1, width=0)
    try:
        built: Strategy = registry.module("strategy", spec.name).build(options, text, nothing)
    except IncompatibleError:
        raise _needs_model(text) from None
    drafter = built.drafter
    if drafter is not None and (drafter.runners or drafter.needs_features or drafter.shares_target_cache):
        raise _needs_model(text)
    return built


def _needs_model(text: str) -> UsageError:
    return UsageError(
        f"strategy '{text}' drafts with a model, and a replay loads none",
        hint=f"replay {' or '.join(MODEL_FREE)}; measure the others with `specbench run`",
    )


def replay(
    outputs: Sequence[Outputs], strategies: Sequence[str], advance: Callable[[], None] = lambda: None
) -> list[Replayed]:
    """Replay every strategy on all outputs, workload by workload, and on all of them together.

    A strategy starts afresh with each workload and temperature. `advance` is called after each output.
    """
    specs = list(dict.fromkeys(strategies))
    together: dict[str, list[RoundRecord]] = {spec: [] for spec in specs}
    found = []
    for group in outputs:
        for spec in specs:
            strategy, rounds = model_free(spec), []
            for number, recorded in enumerate(group.recorded):
                rounds += walk(strategy, recorded, number)
                advance()
            together[spec] += rounds
            found.append(
                Replayed(spec, group.workload, group.temperature, len(group.recorded), _counts(rounds))
            )
    if len(outputs) > 1:
        num = sum(len(group.recorded) for group in outputs)
        found += [Replayed(spec, None, None, num, _counts(together[spec])) for spec in specs]
    return found


def walk(strategy: Strategy, recorded: Recorded, request: int = 0) -> list[RoundRecord]:
    """Return the rounds that a strategy would have taken to a recorded output, alone in its batch.

    Round 0 is the prefill. Of a draft that reaches beyond an output's end (by EOS, say) the part beyond
    counts as not accepted: what the target would have said there is not known. A tree has the room that
    its strategy asks for, also where the context would have ended.
    """
    from specbench.runtime.protocols import BatchView, StepView

    drafter, policy, output = strategy.drafter, strategy.policy, recorded.output
    tokens = [*recorded.prompt, output[0]]
    rounds = [_round(request, 0, ended_by=recorded.ended_by if len(output) == 1 else "none")]
    if drafter is not None:
        drafter.prefill(0, [list(recorded.prompt)], {})
    emitted = 1
    while emitted < len(output):
        remaining = recorded.budget - emitted
        limit = 0
        if drafter is not None:
            view = BatchView([len(tokens)], [remaining], free_slots=remaining)
            limit = max(0, min(policy.choose(view)[0], remaining - 1))
        drafts, parents = _propose(strategy, tokens, limit) if limit else ([], [])
        rest = output[emitted : emitted + len(drafts) + 1]
        accepted, rejected = _agreeing(drafts, parents, rest)
        new = rest[: accepted + 1]
        tokens += new
        emitted += len(new)
        ended_by: EndedBy = recorded.ended_by if emitted == len(output) else "none"
        depth = _depth(parents)
        rounds.append(
            _round(request, len(rounds), len(drafts), depth, accepted, rejected, len(new), ended_by)
        )
        if drafter is not None:
            drafter.commit([accepted], {})
            policy.observe(StepView([len(drafts)], [accepted]))
    if drafter is not None:
        drafter.release([0])
    return rounds


def _counts(rounds: Iterable[RoundRecord]) -> RoundCounts:
    return count_rounds(entry for entry in rounds if entry.round)


def _round(
    request: int,
    number: int,
    drafted: int = 0,
    depth: int = 0,
    accepted: int = 0,
    rejected: bool = False,
    emitted: int = 1,
    ended_by: EndedBy = "none",
) -> RoundRecord:
    return RoundRecord(number, request, number, drafted, depth, accepted, rejected, emitted, ended_by)


def _propose(strategy: Strategy, tokens: list[int], limit: int) -> tuple[list[int], list[int]]:
    """Return the offered nodes of the one row, and their parents (-1: the text)."""
    import torch

    from specbench.decoding.processing import SamplingTensors
    from specbench.decoding.random_numbers import RoundRandom, stream_keys
    from specbench.runtime.protocols import DraftContext

    assert strategy.drafter is not None
    zero = torch.zeros(1, dtype=torch.int64)
    context = DraftContext(
        [tokens],
        [limit],
        SamplingTensors.of([SamplingParams()]),
        RoundRandom(stream_keys([0]), zero, zero),
        prompts=[len(tokens)],
        slots=[max(limit, strategy.lookahead)],
        stop_below=strategy.policy.stop_below,
    )
    proposal: Proposal = strategy.drafter.propose(context)
    num = proposal.offered[0]
    if num and proposal.q.tokens is None:
        raise UsageError(
            f"strategy '{strategy.name}' draws its drafts at random, which a replay cannot judge",
            hint=f"replay {' or '.join(MODEL_FREE)}",
        )
    drafts = proposal.tokens[0, :num].tolist()
    parents = list(range(-1, num - 1)) if proposal.parents is None else proposal.parents[0, :num].tolist()
    return drafts, parents


def _agreeing(drafts: Sequence[int], parents: Sequence[int], rest: Sequence[int]) -> tuple[int, bool]:
    """Return the length of the path that agrees with what came, and whether the next token left the tree."""
    children = {
        (parent, token): node for node, (token, parent) in enumerate(zip(drafts, parents, strict=True))
    }
    node, accepted = -1, 0
    while accepted < len(rest) and (node, rest[accepted]) in children:
        node = children[node, rest[accepted]]
        accepted += 1
    return accepted, accepted < len(rest) and node in parents


def _depth(parents: Sequence[int]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)
