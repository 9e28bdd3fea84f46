"""Ask after each round whether the text ends with a stop string.

One that is complete before the round's last token is passed over. Reports: SGLang 23802, whose window of text
was made for one token a step.
"""

from __future__ import annotations

from dataclasses import replace

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.commit import Committed, Limits, commit
from specbench.runtime.loop import Decision, Row, StepLoop
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "stop and length"
SHOWS: tuple[Shows, ...] = ("contract",)


class StopStringMissedInRun(StepLoop):
    """Look at the end of the text only."""

    def emit(self, row: Row, decision: Decision) -> Committed:
        """Go on where a stop string ends inside of a round."""
        result = super().emit(row, decision)
        if row.stop_checker is None or result.ended_by != "stop":
            return result
        unseen = commit(
            decision.tokens, decision.next_token, Limits(row.remaining, row.eos_ids, row.stop_ids)
        )
        if len(result.tokens) == len(unseen.tokens):
            return replace(unseen, ended_by="stop")
        return unseen


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy miss stop strings inside a run."""
    return plant(strategy, StopStringMissedInRun)
