"""What an audit of a foreign decoder found, and how it is said; plain data, no model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from specbench.audit.budget import Control
from specbench.audit.verdicts import ComponentResult, EffectRecord, Verdict


@dataclass(frozen=True, slots=True)
class GreedyFindings:
    """Outputs at temperature 0 against the reference's logits and its own greedy outputs.

    `exceeded` of `tokens` lie further below the largest logit than `tolerance`; `largest` is the largest
    regret. First differences from the reference's outputs: `near_ties`, which rounding explains, and `real`
    ones. `first_real` describes one of those.
    """

    tokens: int
    exceeded: int
    largest: float
    tolerance: float
    outputs: int
    near_ties: int
    real: int
    first_real: str | None

    @property
    def words(self) -> str:
        """Say it in one sentence."""
        differing = f"{self.near_ties} of {self.outputs} outputs leave the reference's at a near-tie"
        return (
            f"{self.exceeded} of {self.tokens} greedy tokens exceed a regret of {self.tolerance:g}, "
            f"the largest is {self.largest:.2g}; {differing}, {self.real} at a real difference"
            + (f" ({self.first_real})" if self.first_real else "")
        )


@dataclass(frozen=True, slots=True)
class LosslessResult:
    """The verdict on a decoder of which only the outputs are known.

    `log_e` is the largest log e-value of the decisive test and `bar` what it must reach for an alarm;
    `alternative` and `family` fit the outputs best, and mean something only after an alarm, which came after
    `tokens_at_alarm` tokens. `detectable` gives, per direction, the TV per token that would have been found
    with probability .99, or all that there is to find where that is less. `speculation` says what is known
    of it; `speculation_proved` is None if nothing was said.
    """

    name: str
    verdict: Verdict
    reasons: tuple[str, ...]
    components: tuple[ComponentResult, ...]
    controls: tuple[Control, ...]
    budget: str
    promised_tv: float
    tokens: int
    sequences: int
    prompts: int
    log_e: float
    bar: float
    tokens_at_alarm: int | None
    family: str
    alternative: str
    effect: EffectRecord | None
    detectable: Mapping[str, float | None]
    greedy: GreedyFindings | None
    speculation: str
    speculation_proved: bool | None

    @property
    def least_visible(self) -> tuple[str, float | None]:
        """Return the direction in which the most could hide, and how much (None: anything, or unknown)."""
        pairs = self.detectable.items()
        return max(pairs, key=lambda pair: math.inf if pair[1] is None else pair[1], default=("any", None))

    @property
    def line(self) -> str:
        """Return the audit in one line."""
        direction, hidden = self.least_visible
        smallest = "–" if hidden is None else f"{hidden:.3f} ({direction})"
        return (
            f"{self.name}: {self.verdict}, log e {self.log_e:.1f} of {self.bar:.1f}, "
            f"{self.tokens} tokens, smallest detectable TV {smallest}"
        )

    @property
    def message(self) -> str:
        """Return one paragraph: the verdict, why, how large, and what it rests on."""
        parts = [f"{self.name}: {self.verdict}: {'; '.join(self.reasons)}"]
        if self.effect is not None and self.tokens_at_alarm is not None:
            low, high = self.effect.low, self.effect.high
            interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
            parts.append(f"TV at least {self.effect.tv:.2f}{interval} per token ({self.effect.direction})")
        parts.append(
            f"Audited {self.tokens} tokens of {self.sequences} outputs to {self.prompts} prompts, "
            f"budget {self.budget}; {self.speculation}"
        )
        return ". ".join(parts) + "."
