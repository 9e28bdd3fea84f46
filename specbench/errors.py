"""The error tree, and how a near miss is suggested.

SpecbenchError                what a user may see; `exit_code` is what the command line returns
├── UsageError          (2)   the call is wrong: unknown name, bad option, unreadable or malformed input
│   ├── WorkloadError         a prompt file or workload definition that cannot be used
│   ├── ModelError            a model that cannot be found, loaded or decoded by this engine
│   └── IncompatibleError     two models, or a model and a strategy, that do not fit together
├── CheckFailed         (1)   a check ran and found something: a regression, a failed audit
└── NotMeasured         (3)   the measurement could not be made or cannot be trusted
    └── IdentityViolation     records contradict themselves (METRICS.md, identities)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecbenchError(Exception):
    """An error meant for the user: one line of what happened, and a hint at a way out."""

    exit_code = 3

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SpecbenchError):
    """The call cannot be carried out as written."""

    exit_code = 2


class WorkloadError(UsageError):
    """A workload or prompt file cannot be used."""


class ModelError(UsageError):
    """A model cannot be found, loaded or decoded here."""


class IncompatibleError(UsageError):
    """Two models, or a model and a strategy, do not fit together."""


class CheckFailed(SpecbenchError):
    """A check ran and did not hold."""

    exit_code = 1


class NotMeasured(SpecbenchError):
    """The measurement could not be made."""

    exit_code = 3


class IdentityViolation(NotMeasured):
    """The records contradict one another; nothing derived from them can be trusted."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""
