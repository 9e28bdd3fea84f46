"""Look for a stop id in the last token of a round only.

EOS is handled inside the run, the request's own stop ids are left to a check made once a round.
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


class StopIdsMissedInRun(StepLoop):
    """Check the extra token alone."""

    def emit(self, row: Row, decision: Decision) -> Committed:
        """Commit as if no accepted token could be a stop id."""
        limits = Limits(row.remaining, row.eos_ids, frozenset(), row.stop_checker)
        result = commit(decision.tokens, decision.next_token, limits)
        reached = len(result.tokens) > len(decision.tokens)
        return replace(result, ended_by="stop") if reached and decision.next_token in row.stop_ids else result


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy pass over a stop id in mid-run."""
    return plant(strategy, StopIdsMissedInRun)
