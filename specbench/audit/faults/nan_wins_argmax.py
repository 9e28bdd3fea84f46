"""Let a NaN win the argmax of the bonus row.

An overflow in one logit makes a NaN, and argmax prefers it to every number: here that of the last id, in
every fourth round of a request at temperature 0. Requests that are sampled are left alone. Reports: SGLang
11819 on ids that come out of a NaN.
"""

from __future__ import annotations

import math

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.distribution import Distribution
from specbench.runtime.loop import StepLoop, Window
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "numerics"
SHOWS: tuple[Shows, ...] = ("self", "good")


class NanWinsArgmax(StepLoop):
    """Overflow in one logit of greedy requests."""

    def law(self, window: Window) -> Distribution:
        """Return the laws of logits with a NaN in some bonus rows."""
        for index, (row, offered) in enumerate(zip(window.rows, window.proposal.offered, strict=True)):
            if offered and row.round % 4 == 0 and row.request.sampling.temperature == 0:
                window.logits = window.logits.clone()
                window.logits[index, offered, -1] = math.nan
        return super().law(window)


def alter(strategy: Strategy) -> Strategy:
    """Let a NaN into the logits of a strategy."""
    return plant(strategy, NanWinsArgmax)
