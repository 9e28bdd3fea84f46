"""What a finding is: one claim, how bad it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem"]

_RANK: tuple[Status, ...] = ("ok", "warning", "problem")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis.

    A `problem` is a check that failed; a `warning` makes numbers doubtful or work harder. Both name a
    remedy where there is one.
    """

    check: str
    status: Status
    message: str
    remedy: str | None = None


def worst(findings: Iterable[Finding]) -> Status:
    """Return the worst status there is; ok if nothing was found."""
    return max((finding.status for finding in findings), key=_RANK.index, default="ok")
