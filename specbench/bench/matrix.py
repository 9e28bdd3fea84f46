"""The matrix of a run: which prompts, conditions and strategies meet, in which order, with which seeds.

A unit is a handful of prompts under one condition; every strategy serves it before the next unit begins,
in an order that rotates, so that a drift of the machine hits all of them alike. A serving (one strategy,
one unit) is written as soon as it is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.bench.sampling import Encode, build_sampling
from specbench.records import Request, SamplingParams, Schedule, derived_seed
from specbench.records import samples as draw_samples
from specbench.workloads import Load, Workload, poisson_arrivals

UNIT_PROMPTS = 4
"""Prompts that one strategy decodes in a row at concurrency 1 before the next takes its turn."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as token ids; `grammar` constrains the answer, as in `specbench.grammar`."""

    id: str
    tokens: tuple[int, ...]
    max_new_tokens: int
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """Some prompts of a workload under one condition, in one repeat."""

    workload: str
    temperature: float
    load: Load
    repeat: int
    number: int
    prompts: tuple[Encoded, ...]


def units(workloads: Sequence[Workload], prompts: dict[str, list[Encoded]], repeats: int) -> Iterator[Unit]:
    """List the units of a run in order; closed loads come first, since they measure the capacity."""
    for repeat in range(repeats):
        for workload in workloads:
            for load in sorted(workload.loads, key=lambda load: load.kind != "closed"):
                for temperature in workload.temperatures:
                    encoded = prompts[workload.name]
                    size = UNIT_PROMPTS if load.concurrency == 1 else len(encoded)
                    for number, start in enumerate(range(0, len(encoded), size)):
                        part = tuple(encoded[start : start + size])
                        yield Unit(workload.name, temperature, load, repeat, number, part)


def schedule(
    unit: Unit,
    *,
    seed: int,
    rate: float | None,
    again: bool,
    asked: Mapping[str, Any] | None = None,
    encode: Encode = lambda _: (0,),
    samples: int = 1,
) -> Schedule:
    """Return what one strategy serves: the same prompts, arrivals and seeds for all of them.

    With `again`, the A/A arm, the sampling seeds differ, so that it shows the noise of content as well.
    `asked` are further sampling parameters (`build_sampling`, which needs `encode`); each prompt is
    requested `samples` times.
    """
    requests: list[Request] = []
    arrivals = [0.0] * len(unit.prompts)
    if unit.load.kind == "poisson":
        assert rate is not None
        arrival_seed = derived_seed(seed, unit.workload, unit.temperature, unit.repeat, "arrivals")
        arrivals = poisson_arrivals(len(unit.prompts), rate, arrival_seed)
    for index, prompt in enumerate(unit.prompts):
        own_seed = derived_seed(seed, unit.workload, prompt.id, unit.repeat, "again" if again else "")
        params = request_sampling(prompt, asked or {}, encode, temperature=unit.temperature, seed=own_seed)
        request = Request(index * samples, prompt.tokens, params, prompt.id, arrivals[index])
        requests += draw_samples(request, samples)
    return Schedule(
        tuple(requests),
        concurrency=unit.load.concurrency,
        share_prefill=samples > 1,
        # Read back by `trace`; where requests are served one at a time it costs nothing to speak of.
        record_drafts=unit.load.concurrency == 1,
        samples=samples,
    )


def request_sampling(prompt: Encoded, asked: Mapping[str, Any], encode: Encode, **own: Any) -> SamplingParams:
    """Return the parameters of a prompt's requests: what was asked for, its own budget and its grammar."""
    if prompt.grammar is not None:
        own["grammar"] = prompt.grammar
    return build_sampling(asked, encode=encode, max_new_tokens=prompt.max_new_tokens, **own)
