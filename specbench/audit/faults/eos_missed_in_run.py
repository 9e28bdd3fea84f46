"""Look for an EOS in the last token of a round only.

An EOS among the accepted draft tokens is passed over, and decoding goes on. Reports: SGLang 2150, whose
first EAGLE worker did not stop at the end token.
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


class EosMissedInRun(StepLoop):
    """Check the extra token alone."""

    def emit(self, row: Row, decision: Decision) -> Committed:
        """Commit as if no accepted token could be an EOS."""
        limits = Limits(row.remaining, frozenset(), row.stop_ids, row.stop_checker)
        result = commit(decision.tokens, decision.next_token, limits)
        reached = len(result.tokens) > len(decision.tokens)
        return replace(result, ended_by="eos") if reached and decision.next_token in row.eos_ids else result


def alter(strategy: Strategy) -> Strategy:
    """Let a strategy pass over an EOS in mid-run."""
    return plant(strategy, EosMissedInRun)
