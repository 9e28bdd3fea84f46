"""Decoders broken on purpose, one rule each, as seen in real code: how we know that the audit works.

A fault is a module with three names. `alter(strategy)` returns the strategy with one rule broken, or the
strategy itself where it has no such rule: ordinary decoding, chains for a fault of trees. `CLASS` is what
kind of mistake it is, `SHOWS` where it can be noticed. Its file's stem is its name, underscores as hyphens.

Reports are named as project and number of the issue or pull request. Where a docstring names none, the
fault is another member of a class that others were reported of.
"""

from __future__ import annotations

from typing import Literal

FaultClass = Literal[
    "accept test",
    "residual",
    "proposal q",
    "bonus row",
    "KV and position state",
    "stop and length",
    "parameters",
    "grammar",
    "randomness",
    "batch",
    "numerics",
    "vocabulary",
    "metrics",
    "logprobs",
]
"""The kinds of mistakes, in the order in which they are listed."""

Shows = Literal[
    "self",
    "good",
    "bad",
    "contract",
    "identities",
    "acceptance",
    "proposals",
    "collisions",
    "parameters",
    "logprobs",
    "unit tests",
]
"""Where a fault shows; nowhere means that it costs acceptance and leaves the output right.

`self`, `good` and `bad`: in the law of what is emitted, with a draft equal to the target, like it, or unlike
it. `parameters`: in that law, where a request has the parameter. `unit tests`: in that law too, but by less
than samples of a usual size can tell. The others are checks of the audit: broken contracts, records that
contradict one another, acceptance against its chance, drafted tokens against their q, identical completions,
log-probabilities against the reference.
"""
