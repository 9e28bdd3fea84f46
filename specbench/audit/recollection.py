"""Evidence without a theory of the fault: completions of a prompt go on as the earlier ones did."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from specbench.audit.betting import Mixture
from specbench.audit.verdicts import ComponentResult

WEIGHTS = (30.0, 100.0, 300.0, 1000.0)
"""How many completions the target's own law counts for: small ones learn fast, and pay for noise."""
DEPTH = 8
"""Tokens of a completion that are remembered; later ones hardly ever follow the same beginning."""


class Recollection:
    """An e-process that learns from earlier completions what follows a beginning, and bets on it.

    Null hypothesis: each token is drawn from the target's law p after its prefix, given all completions
    before. After a beginning that n earlier completions of the prompt shared, n(x) of which went on with x,
    the bet is the law a(x) = (n(x) + w p(x)) / (n + w): the predictive law of a multinomial with a Dirichlet
    prior around p of weight w. It depends on the past alone, so the products of a(x) / p(x) are e-processes,
    and their average over weights alarms with probability at most alpha.

    Any deviation that is there every time is learned, whatever its form: this is the sequential relative of
    a chi-squared test over whole continuations, for when nothing is known of the draft. It takes many
    completions of few prompts, some 1 / (2 TV^2) times the number of tokens that are likely.

    Invalid when completions were left out for what they said, or are added in another order than that of
    submission. Completions that copy one another alarm here too: see `Collisions`.

    No alarm shows little unless prompts were repeated often, and nothing of tokens beyond the first 8.

    References:
        Ville's inequality, and Ramdas et al., "Game-theoretic statistics and safe anytime-valid inference"
        (2023), on plug-in and mixture bets.

    >>> memory = Recollection(alpha=0.001)
    >>> for _ in range(60):
    ...     memory.add("prompt", [7], [0.25])
    >>> (memory.result().alarm, memory.mixture.alarm_at)
    (True, 19)
    """

    def __init__(self, alpha: float) -> None:
        self.mixture = Mixture([f"weight {weight:g}" for weight in WEIGHTS], alpha)
        self._after: dict[tuple[Hashable, tuple[int, ...]], Counter[int]] = defaultdict(Counter)

    def add(self, prompt: Hashable, completion: Sequence[int], probabilities: Sequence[float]) -> None:
        """Take in one completion, in the order of submission.

        Args:
            prompt: Which prompt it belongs to.
            completion: Its tokens, with the EOS if it ended in one.
            probabilities: Of each token under the target. 0 is a matter for the support test: such a token
                changes nothing here, except that later completions may repeat it.
        """
        weights = np.array(WEIGHTS)
        total = np.zeros(len(WEIGHTS))
        for place, (token, p) in enumerate(zip(completion[:DEPTH], probabilities, strict=False)):
            if not 0 <= p <= 1 + 1e-6:  # also refuses NaN
                raise ValueError(f"a probability is {p}")
            seen = self._after[prompt, tuple(completion[:place])]
            before = seen.total()
            if before and p > 0:
                total += np.log((seen[token] / p + weights) / (before + weights))
            seen[token] += 1
        self.mixture.multiply(total)

    def result(self) -> ComponentResult:
        """Return what was found so far."""
        steps = self.mixture.steps
        return self.mixture.component(
            "continuations",
            steps,
            found=f"some continuations come more often than the target's law has them, {steps} completions",
            quiet=f"{steps} completions of the prompts do not depart from the target's law alike",
        )
