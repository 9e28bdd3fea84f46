"""Let penalties and bad words see the committed tokens only.

Every row of the window is processed as if it followed the last committed token: a token that a draft says
twice is penalised once, and a forbidden word that begins inside the run is not recognised. Reports: vLLM
6718, on how a later position could know of an earlier one.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specbench.audit.faults import FaultClass, Shows
from specbench.audit.faults._loops import plant
from specbench.decoding.processing import History, SamplingTensors
from specbench.runtime.loop import StepLoop, Window
from specbench.runtime.protocols import Strategy

CLASS: FaultClass = "parameters"
SHOWS: tuple[Shows, ...] = ("parameters", "contract")


class PenaltiesSeeCommittedOnly(StepLoop):
    """Forget the drafts that a row follows."""

    def history(self, window: Window, sampling: SamplingTensors) -> History | None:
        """Return histories that end with the last committed token."""
        history = super().history(window, sampling)
        if history is None:
            return None
        return replace(history, ancestors=torch.zeros_like(history.ancestors))


def alter(strategy: Strategy) -> Strategy:
    """Hide drafts from what depends on the text so far."""
    return plant(strategy, PenaltiesSeeCommittedOnly)
