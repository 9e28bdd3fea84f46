"""Length policies, one file each: how many tokens to draft, at most a strategy's `k`."""

from __future__ import annotations

from specbench import registry
from specbench.runtime.protocols import LengthPolicy


def length_policy(text: str, k: int) -> LengthPolicy:
    """Build the policy that a strategy's option `policy` names; it never chooses more than `k`."""
    spec = registry.parse_nested(text)
    options = registry.options("policy", spec)
    built: LengthPolicy = registry.module("policy", spec.name).build(options, k)
    return built
