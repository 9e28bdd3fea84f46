"""What a run is asked to do, with its defaults, as one value that decides whether two runs are the same."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from specbench import registry
from specbench.audit.budget import budget_named
from specbench.bench.sampling import parse_sampling
from specbench.errors import UsageError, did_you_mean

BASELINE = "ordinary"
AGAIN = "ordinary#2"
"""The A/A row: ordinary decoding against itself, under other random numbers."""

DEFAULT_STRATEGIES = ("ngram:k=4", "early-exit:layers=8,k=2")
DEFAULT_WORKLOADS = ("predictable", "novel", "short-output", "high-concurrency")


@dataclass(frozen=True, slots=True)
class ModelSet:
    """Models that go together under one name, and what is measured with them by default."""

    target: str
    draft: str | None
    dtype: str
    strategies: tuple[str, ...]
    workloads: tuple[str, ...]


MODEL_SETS = {
    "tiny": ModelSet(
        target="tiny",
        draft="tiny-draft",
        dtype="float32",
        strategies=("ngram:k=4", "draft:k=3", "early-exit:layers=2,k=2"),
        workloads=tuple(f"tiny-{name}" for name in DEFAULT_WORKLOADS),
    ),
    # On CPU bfloat16 is twice as fast as float32.
    "smollm2": ModelSet("smollm2", None, "bfloat16", DEFAULT_STRATEGIES, DEFAULT_WORKLOADS),
}

QUICK_LIMITS = {"predictable": 6, "novel": 6, "short-output": 10, "high-concurrency": 12}
QUICK_LIMIT = 6
QUICK_TOKENS = 40
QUICK_LOADS = {"high-concurrency": ("c=8", "poisson=0.7")}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The question a run answers. Two runs with equal configurations may continue one another.

    `None` for temperatures, loads, limit and max_new_tokens means what each workload says. `dtype`
    "auto" is the checkpoint's own. `sampling` are further parameters of every request as `name=value`;
    `audit_budget` names that of the full audit; None checks whole continuations only. `samples` is how
    many samples of each prompt are decoded together, from one prefill.
    """

    target: str
    draft: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    draft_device: str | None = None
    engine: str = "local"
    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    workloads: tuple[str, ...] = DEFAULT_WORKLOADS
    temperatures: tuple[float, ...] | None = None
    loads: tuple[str, ...] | None = None
    limit: int | None = None
    max_new_tokens: int | None = None
    repeats: int = 1
    rows: int = 32
    seed: int = 0
    sampling: tuple[str, ...] = ()
    samples: int = 1
    quick: bool = False
    audit: bool = True
    audit_dtype: str = "float32"
    audit_budget: str | None = None
    inject: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be run, before anything is loaded."""
        if self.audit_budget is not None:
            budget_named(self.audit_budget)
        elif self.audit and self.audit_dtype in ("bfloat16", "float16"):
            raise UsageError(
                f"--audit-dtype is {self.audit_dtype}; continuations alone are judged in float32 only",
                hint="add --audit-budget quick, which measures what rounding does, or leave it out",
            )
        parse_sampling(self.sampling)
        if self.samples > self.rows:
            raise UsageError(
                f"--samples {self.samples} of a prompt are decoded together, and --rows is {self.rows}",
                hint="raise --rows, or ask for fewer samples",
            )
        for name in ("repeats", "rows", "samples"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} is {getattr(self, name)}; expected 1 or more")
        registry.options("engine", registry.parse(self.engine))
        for text in self.strategies:
            registry.options("strategy", registry.parse(text.partition("#")[0]))
        if self.inject is not None:
            registry.module("fault", self.inject)
        if self.temperatures is not None and not all(0 <= t < math.inf for t in self.temperatures):
            raise UsageError(
                "a temperature is negative or no number; expected 0 or more",
                hint="0 is greedy, 1 the model's own law",
            )

    @property
    def arms(self) -> tuple[str, ...]:
        """Return the strategies as run: the baseline first, then itself again, then the others."""
        others = [s for s in dict.fromkeys(self.strategies) if s not in (BASELINE, AGAIN)]
        return (BASELINE, AGAIN, *others)

    def resolved(self, **values: Any) -> RunConfig:
        """Return a copy with values filled in."""
        return replace(self, **values)

    @property
    def digest(self) -> str:
        """Return a short hash that equal configurations share."""
        return digest_of(self)


def model_set(models: str | None, target: str | None) -> str | None:
    """Return the name of the bundled set that is meant: tiny unless another or a target is given.

    None for a target of the user's own; raises UsageError for an unknown set, or both.
    """
    if models and target:
        raise UsageError("--models and --target both name the target", hint="give one of them")
    name = models or (None if target else "tiny")
    if name is not None and name not in MODEL_SETS:
        raise UsageError(
            f"no bundled models '{name}'{did_you_mean(name, MODEL_SETS)}",
            hint=f"use one of {', '.join(MODEL_SETS)}, or --target for a model of your own",
        )
    return name


def digest_of(config: Any) -> str:
    """Return a short hash that equal configurations, dataclasses of plain values, share."""
    text = json.dumps(asdict(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def quick_limit(workload: str) -> int:
    """Return how many prompts of a workload a quick run measures."""
    return QUICK_LIMITS.get(workload.removeprefix("tiny-"), QUICK_LIMIT)


def quick_loads(workload: str) -> tuple[str, ...] | None:
    """Return the loads of a quick run; None for the workload's own."""
    return QUICK_LOADS.get(workload.removeprefix("tiny-"))
