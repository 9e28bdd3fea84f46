"""Identical completions of one prompt: do requests share random numbers?"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specbench.audit.betting import Mixture
from specbench.audit.verdicts import ComponentResult

SHARES = (0.003, 0.01, 0.1, 0.5)
"""Shares of copied completions that the bets are made for."""


class Collisions:
    """An e-process that grows when a completion repeats an earlier one of the same prompt.

    Null hypothesis: each completion is drawn from its prompt's law p, independently of those before it. The
    alternative is that a share e of them copies an earlier one, chosen uniformly: the factor of the j-th
    completion s of a prompt is (1 - e) + e c / ((j - 1) p(s)), c being how many of the earlier ones equal s.
    Its expectation is 1 under the null (less where an earlier completion was impossible), also given all
    other prompts, so the factors of all prompts multiply in the order of submission.

    Invalid when completions were left out for what they said or how long they took, when they are added in
    another order than the one fixed in advance (that of submission), or when p is not the law of the whole
    completion: it includes the end of the text, and the limit on its length.

    No alarm does not show that streams are separate: requests that share only some of their numbers differ,
    and copies of completions that are likely anyway carry no evidence.

    References:
        Ramdas et al., "Game-theoretic statistics and safe anytime-valid inference" (2023), on Ville's
        inequality and mixtures.

    >>> streams = Collisions(alpha=0.001)
    >>> for tokens in [(3, 1, 4), (2, 7, 1), (3, 1, 4), (1, 4, 1)]:
    ...     streams.add("prompt", tokens, log_p=-12.0)
    >>> (streams.result().alarm, streams.repeats)
    (True, 1)
    """

    def __init__(self, alpha: float) -> None:
        self.mixture = Mixture([f"{share:g} copied" for share in SHARES], alpha)
        self.repeats = 0
        self._tokens = 0
        self._earlier: dict[Hashable, Counter[tuple[int, ...]]] = defaultdict(Counter)

    def add(self, prompt: Hashable, completion: Sequence[int], log_p: float) -> None:
        """Take in one completion, in the order of submission.

        Args:
            prompt: Which prompt it belongs to.
            completion: Its tokens, with the EOS if it ended in one.
            log_p: Its log probability under the target. -inf is a matter for the support test: such a
                completion changes nothing here, except that later ones may repeat it.
        """
        if not log_p <= 1e-6:  # also refuses NaN
            raise ValueError(f"log_p is {log_p}; expected the logarithm of a probability")
        earlier = self._earlier[prompt]
        key = tuple(completion)
        copies, before = earlier[key], earlier.total()
        earlier[key] += 1
        self._tokens += len(key)
        self.repeats += copies > 0
        if before and log_p > -math.inf:
            shares = np.array(SHARES)
            fresh = np.log1p(-shares)
            if copies:
                copied = np.log(shares) + math.log(copies / before) - log_p
                fresh = np.logaddexp(fresh, copied)
            self.mixture.multiply(fresh)

    def state(self) -> dict[str, Any]:
        """Return what is needed to go on later, but for the completions, in JSON types."""
        return {"mixture": self.mixture.state(), "repeats": self.repeats, "tokens": self._tokens}

    def restore(self, state: Mapping[str, Any], earlier: Iterable[tuple[Hashable, Sequence[int]]]) -> None:
        """Go on from a saved state, given every prompt and completion that was added before."""
        self.mixture.restore(state["mixture"])
        self.repeats, self._tokens = state["repeats"], state["tokens"]
        for prompt, completion in earlier:
            self._earlier[prompt][tuple(completion)] += 1

    def result(self) -> ComponentResult:
        """Return what was found so far."""
        return self.mixture.component(
            "collisions",
            self._tokens,
            found=f"{self.repeats} completions repeat an earlier one: requests share random numbers",
            quiet=f"{self.repeats} completions repeat an earlier one, no more than chance allows",
        )
