"""Ignore min_new_tokens in the verification.

The draft keeps to it; the target's rows do not, so an EOS may be sampled early.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import OnDraftOnly, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "stop and length"
SHOWS: tuple[Shows, ...] = ("contract",)


class MinNewTokensIgnored(OnDraftOnly):
    """Verify without the least length."""

    parameter = "min_new_tokens"


def alter(strategy: Strategy) -> Strategy:
    """Take min_new_tokens out of the verification."""
    return plant(strategy, MinNewTokensIgnored)
