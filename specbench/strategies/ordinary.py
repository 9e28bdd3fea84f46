"""Ordinary decoding: speculation with an empty draft. The baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

from specbench.decoding.verification import ExactMatch
from specbench.policies.fixed import Fixed
from specbench.runtime.protocols import Resources, Strategy


@dataclass(frozen=True, slots=True)
class Options:
    """Ordinary decoding has no options."""


def build(options: Options, name: str, resources: Resources) -> Strategy:
    """Build the strategy."""
    del options, resources
    return Strategy(name, drafter=None, rule=ExactMatch(), policy=Fixed(1), lossless=True)
