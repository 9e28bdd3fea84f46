"""Apply bad words to the bonus row only.

A forbidden word then appears in accepted runs, and across the edges of rounds.
"""

from __future__ import annotations

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import OnBonusOnly, plant
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters", "contract")


class BadWordsOnBonusOnly(OnBonusOnly):
    """Leave bad words out of the rows that judge drafts."""

    parameter = "bad_words"


def alter(strategy: Strategy) -> Strategy:
    """Take bad words out of the rows that judge drafts."""
    return plant(strategy, BadWordsOnBonusOnly)
