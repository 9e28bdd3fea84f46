"""What the plots of an audit are drawn from: evidence over tokens, thinned, and a histogram of PIT values.

Knows how much is kept of a long audit, and judges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specbench.audit.alternatives import FloatArray
from specbench.audit.verdicts import Traces
from specbench.records import derived_seed

MOST_POINTS = 300
"""Points kept of a trace, beside the largest and the last: about one per pixel column of a small plot."""
PIT_BINS = 20
DECIMALS = 4
"""Of a stored log e; a plot shows two."""


class TraceRecorder:
    """Keeps the traces of one strategy's audit while it runs, in bounded memory.

    Of the evidence it keeps every `stride`-th token, and doubles the stride when there are too many; so what
    is kept is evenly spaced and depends on the number of tokens alone, but for the largest and the last.
    """

    def __init__(self, regimes: Sequence[str]) -> None:
        """Start before the first token, where every e-value is 1.

        Args:
            regimes: Their names, in the order of the columns that `add` is given.
        """
        self.regimes = tuple(regimes)
        self._stride = 1
        start = np.zeros(2 + len(self.regimes))  # tokens, log e of the whole, log e of each regime
        self._kept = start[None]
        self._largest = self._last = start
        self._pit = {name: np.zeros(PIT_BINS, dtype=np.int64) for name in self.regimes}

    def add(self, regime: str, paths: FloatArray, pit: FloatArray) -> None:
        """Take some consecutive tokens of one regime.

        Args:
            regime: Whose tokens they are.
            paths: Log e after each, `[T, 1 + regimes]`, as `EProcess.update` returns it.
            pit: The randomised PIT value of each, `[T]`, as `randomised_pit` returns it.
        """
        if not len(paths):
            return
        rows = np.column_stack([self._last[0] + np.arange(1, len(paths) + 1), paths])
        self._kept = np.concatenate([self._kept, rows[rows[:, 0] % self._stride == 0]])
        while len(self._kept) > MOST_POINTS:
            self._stride *= 2
            self._kept = self._kept[self._kept[:, 0] % self._stride == 0]
        best = rows[int(paths[:, 0].argmax())]
        if best[1] > self._largest[1]:
            self._largest = best
        self._last = rows[-1]
        bins = np.minimum((pit * PIT_BINS).astype(np.int64), PIT_BINS - 1)
        self._pit[regime] += np.bincount(bins, minlength=PIT_BINS)

    def result(self) -> Traces:
        """Return what was kept, at any time."""
        rows = np.unique(np.vstack([self._kept, self._largest, self._last]), axis=0)
        columns = [tuple(column) for column in rows[:, 1:].T.round(DECIMALS).tolist()]
        return Traces(
            tokens=tuple(int(number) for number in rows[:, 0]),
            log_e=columns[0],
            log_e_by_regime=dict(zip(self.regimes, columns[1:], strict=True)),
            pit={name: tuple(counts.tolist()) for name, counts in self._pit.items()},
        )

    def state(self) -> dict[str, Any]:
        """Return everything needed to go on later, in JSON types."""
        return {
            "regimes": list(self.regimes),
            "stride": self._stride,
            "kept": self._kept.tolist(),
            "largest": self._largest.tolist(),
            "last": self._last.tolist(),
            "pit": {name: counts.tolist() for name, counts in self._pit.items()},
        }

    @classmethod
    def resume(cls, state: Mapping[str, Any]) -> TraceRecorder:
        """Go on from a saved state."""
        recorder = cls(state["regimes"])
        recorder._stride = state["stride"]
        recorder._kept = np.array(state["kept"])
        recorder._largest, recorder._last = np.array(state["largest"]), np.array(state["last"])
        recorder._pit = {name: np.array(counts, dtype=np.int64) for name, counts in state["pit"].items()}
        return recorder


def randomised_pit(p: Tensor, tokens: Tensor, seed: int) -> npt.NDArray[np.float64]:
    """Return the randomised probability integral transform of emitted tokens, `[T]`, each in [0, 1].

    u = P(X < x) + v P(X = x), ids in their order, with v uniform: where every token follows its p, the
    values are independent and uniform. Few wrong decoders show clearly in them, and what shows need not
    be wrong in a way that ids order; so this is for a picture and never for a verdict.

    Args:
        p: The target's processed distribution before each token, `[T, V]` float64.
        tokens: What was emitted, `[T]` int64.
        seed: Of the sequence; v comes from one derived from it, so nothing of it is used twice.

    References:
        Brockwell, Universal residuals: a multivariate transformation, Statistics & Probability Letters 77
        (2007).

    >>> import torch
    >>> p = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    >>> bool(0.5 <= randomised_pit(p, torch.tensor([1]), seed=0)[0] <= 0.75)
    True
    """
    places = tokens[:, None]
    mass = p.gather(1, places).squeeze(1)
    below = torch.stack([row[:token].sum() for row, token in zip(p, tokens.tolist(), strict=True)])
    shares = np.random.default_rng(derived_seed("pit", seed)).random(len(tokens))
    return np.asarray((below.numpy() + shares * mass.numpy()).clip(0.0, 1.0), dtype=np.float64)
