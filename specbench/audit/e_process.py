"""The primary test: a mixture e-process over plausible ways of being wrong, and what it could have found.

Knows how evidence is averaged, when it alarms, and how the state is saved; `alternatives` knows the laws.
Takes scores of tokens, in whole sequences; no model, no text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specbench.audit.alternatives import Alternatives, FloatArray, Plan, Scores
from specbench.audit.verdicts import ComponentResult
from specbench.errors import UsageError

IntArray = npt.NDArray[np.int64]

POWER_Z = 2.33
"""Normal quantile of .99: the chance that an effect of the smallest detectable size is found."""
FEWEST_SEQUENCES = 10
"""Fewer sequences than this give an estimate without an interval."""
CHOOSING, ESTIMATING, FRESH = range(3)
"""The parts that sequences are split into: even ones before an alarm, odd ones before it, all after it."""


@dataclass(frozen=True, slots=True)
class Effect:
    """How far the output is from the target in one direction: mean TV per token, at least.

    `tv` is the mean of 1[x in A] - p(A) over tokens, A what the direction makes more likely: an unbiased
    estimate of a lower bound for the distance, negative at times where there is none. `low` and `high` are
    a 95 % interval with the sequence as unit, None with too few. The direction was chosen on other
    sequences than the estimate uses. `is_fresh`: those came after the alarm; otherwise they are every other
    one before it, and stopping at the alarm makes the estimate somewhat too large.
    """

    direction: str
    tv: float
    low: float | None
    high: float | None
    sequences: int
    tokens: int
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class Detectable:
    """What would have been found in one direction, as mean TV per token over the contexts audited.

    `smallest` would have been found with chance .99; None if no strength would. `largest` is the distance
    at the greatest strength: a direction in which nothing could be found hides at most that.
    """

    smallest: float | None
    largest: float

    @property
    def hidden(self) -> float:
        """The most that could have gone unnoticed: below the smallest found, or all there is to find."""
        return self.largest if self.smallest is None else self.smallest

    def within(self, promise: float) -> bool:
        """Whether nothing beyond the promised distance can have gone unnoticed."""
        return self.hidden <= promise


@dataclass(frozen=True, slots=True)
class Position:
    """The token that speaks most for the best-fitting alternative, to be replayed."""

    sequence: int
    offset: int
    log_factor: float


@dataclass(frozen=True, slots=True)
class RegimeResult:
    """What one draft regime's tokens say by themselves. `detectable` is as in `EProcessResult`."""

    regime: str
    tokens: int
    sequences: int
    unsupported: int
    log_e_value: float
    best_alternative: str
    best_family: str
    best_log_evidence: float
    effect: Effect | None
    worst: Position | None
    detectable: Mapping[str, Detectable | None]


@dataclass(frozen=True, slots=True)
class EProcessResult:
    """Where the test stands.

    `log_e_value` is now, `log_supremum` the largest it ever was; the null is rejected when that reached
    log(1 / `alpha`), after `tokens_at_alarm` tokens of all regimes together. `best_regime` is where the
    best-fitting alternative gathered most; `best_log_evidence` is negative or near 0 when nothing is
    wrong, and the name then means nothing. `detectable` says for each direction what would have been found,
    were it present in all regimes alike; None where contexts were not examined for it. `unsupported` counts
    tokens with p = 0, which the support test judges.
    """

    alpha: float
    is_rejected: bool
    log_e_value: float
    log_supremum: float
    tokens: int
    tokens_at_alarm: int | None
    unsupported: int
    best_regime: str
    best_alternative: str
    best_family: str
    best_log_evidence: float
    detectable: Mapping[str, Detectable | None]
    regimes: tuple[RegimeResult, ...]

    def component(self) -> ComponentResult:
        """Return this as one component of an audit."""
        bar = -math.log(self.alpha)
        if self.is_rejected:
            words = (
                f"log e {self.log_supremum:.1f} reached {bar:.1f} after {self.tokens_at_alarm} tokens; "
                f"most like {self.best_family} ({self.best_alternative})"
            )
            if len(self.regimes) > 1:
                words += f", regime {self.best_regime}"
        else:
            words = f"log e at most {self.log_supremum:.1f}, below {bar:.1f}, over {self.tokens} tokens"
        return ComponentResult(
            "e-process", self.is_rejected, self.log_supremum, "log e", self.alpha, self.tokens, words
        )


@dataclass
class _Stream:
    """The tokens of one regime: evidence and what is needed to describe an effect. Plain numbers only."""

    tokens: int = 0
    sequences: int = 0
    unsupported: int = 0
    current: int | None = None  # the sequence under way; it counts as a unit when it is over
    part: int = CHOOSING
    current_tokens: int = 0
    current_witness: FloatArray = field(default_factory=lambda: np.zeros(0))
    evidence: FloatArray = field(default_factory=lambda: np.zeros((3, 0)))  # [parts, alternatives]
    units: FloatArray = field(default_factory=lambda: np.zeros((3, 3)))  # [parts, (1, n, n^2)] summed
    witness: FloatArray = field(
        default_factory=lambda: np.zeros((3, 0, 3))
    )  # [parts, directions, (w, w^2, w n)]
    largest: FloatArray = field(default_factory=lambda: np.zeros(0))  # [alternatives]
    places: IntArray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))

    @classmethod
    def start(cls, alternatives: Alternatives) -> _Stream:
        num, directions = len(alternatives.names), len(alternatives.directions)
        return cls(
            current_witness=np.zeros(directions),
            evidence=np.zeros((3, num)),
            witness=np.zeros((3, directions, 3)),
            largest=np.zeros(num),
            places=np.zeros((num, 2), dtype=np.int64),
        )

    def total(self) -> FloatArray:
        """Log evidence of each alternative."""
        return np.asarray(self.evidence.sum(0))

    def take(self, scores: Scores, sequences: IntArray, offsets: IntArray, alarmed: bool) -> None:
        """Add tokens; those of one sequence are consecutive, over calls too."""
        starts = np.flatnonzero(np.r_[True, sequences[1:] != sequences[:-1]])
        stops = np.r_[starts[1:], len(sequences)]
        witness = np.add.reduceat(scores.witness, starts, axis=0)
        factors = np.add.reduceat(scores.log_factors, starts, axis=0)
        for place, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            if int(sequences[start]) != self.current:
                self._close()
                self.current = int(sequences[start])
                self.part = FRESH if alarmed else (CHOOSING, ESTIMATING)[self.sequences % 2]
            self.current_tokens += stop - start
            self.current_witness = self.current_witness + witness[place]
            self.evidence[self.part] += factors[place]
        best = scores.log_factors.argmax(0)
        value = scores.log_factors.max(0)
        larger = value > self.largest
        self.largest = np.where(larger, value, self.largest)
        here = np.stack([sequences[best], offsets[best]], 1)
        self.places = np.where(larger[:, None], here, self.places)
        self.tokens += len(scores)
        self.unsupported += int((~scores.supported).sum())

    def _close(self) -> None:
        if self.current is None:
            return
        n, w = self.current_tokens, self.current_witness
        self.units[self.part] += (1, n, n * n)
        self.witness[self.part] += np.stack([w, w * w, w * n], 1)
        self.sequences += 1
        self.current_tokens, self.current_witness = 0, np.zeros_like(w)

    def effect(self, alternatives: Alternatives) -> Effect | None:
        """Estimate the effect on sequences that did not choose its direction."""
        is_fresh = self.units[FRESH, 0] >= FEWEST_SEQUENCES
        chosen_on = self.evidence[:FRESH].sum(0) if is_fresh else self.evidence[CHOOSING]
        part = FRESH if is_fresh else ESTIMATING
        count, n, n_squared = self.units[part].tolist()
        if count == 0:
            return None
        direction = alternatives.direction_of[int(chosen_on.argmax())]
        w, w_squared, w_n = self.witness[part, direction].tolist()
        tv = w / n
        low = high = None
        if count >= FEWEST_SEQUENCES:
            from scipy import stats  # takes half a second

            squares = max(0.0, w_squared - 2 * tv * w_n + tv * tv * n_squared)
            error = math.sqrt(squares * count / (count - 1)) / n
            half = float(stats.t.ppf(0.975, count - 1)) * error
            low, high = tv - half, tv + half
        name = alternatives.directions[direction].name
        return Effect(name, tv, low, high, int(count), int(n), bool(is_fresh))

    def plain(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in values.items()}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> _Stream:
        arrays = {name: np.array(v, dtype=np.float64) for name, v in values.items() if isinstance(v, list)}
        arrays["places"] = arrays["places"].astype(np.int64)
        return cls(**{**values, **arrays})


class EProcess:
    """The e-process of one strategy over its draft regimes.

    Null hypothesis: given the prompt and what was emitted before it, every emitted token is drawn from
    the target's processed distribution p_t. For a law a_t that is a function of (prompt, x_<t) alone, the
    product of a_t(x_t) / p_t(x_t) then has expectation at most 1 at any stopping time, and so has an
    average of such products: the chance that it ever reaches 1 / alpha is at most alpha (Ville), for any
    dependence between tokens and any rule for stopping.

    The average is over alternatives with equal weights, and then over the regimes and one more product that
    runs on through all regimes: a fault that is present in every regime is found by their tokens together,
    one that shows in a single regime by that regime alone. With one regime there is nothing to pool.

    Invalid when tokens were left out, or a sequence's place in the order chosen, for how they turned out
    (acceptance, finish reason, EOS dropped, timeouts); when q comes from recorded proposals rather than
    from the prefix; when p comes from the decoder under audit or from another precision; or when, after
    resuming, random numbers are used again.

    Not rejecting does not show that the decoder is lossless. It speaks of the directions in
    `EProcessResult.detectable` and those near them, at the sizes given there, on these prompts. Unsystematic
    deviations (a fixed noise on the logits) gather no evidence in any direction.

    Sequences are taken in submission order, each with all its tokens one after the other, from the first
    to EOS inclusive. Which regime comes next must not depend on how tokens turned out.

    References:
        Ville, Étude critique de la notion de collectif (1939); Ramdas, Grünwald, Vovk and Shafer,
        Game-theoretic statistics and safe anytime-valid inference, Statistical Science 38 (2023).

    >>> import torch
    >>> p = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).expand(300, 3)
    >>> test = EProcess({"all": False}, alpha=0.001)
    >>> test.observe("all", p, torch.zeros(300, dtype=torch.int64), sequence=0)
    >>> (test.is_rejected, test.result().tokens_at_alarm, test.result().best_family)
    (True, 54, 'greedy mix')
    """

    def __init__(self, regimes: Mapping[str, bool], *, alpha: float, plan_every: int = 1) -> None:
        """Start without evidence.

        Args:
            regimes: Name of each regime, and whether the auditor has a draft law q for it.
            alpha: The level of this strategy's e-process.
            plan_every: What could have been found is computed on every so many contexts, and scaled up.
        """
        if not regimes:
            raise ValueError("no regime; expected at least one")
        if not 0 < alpha < 1:
            raise ValueError(f"alpha is {alpha}; expected a number between 0 and 1")
        self.alpha = alpha
        self.plan_every = plan_every
        self._alternatives = {name: Alternatives(has_draft) for name, has_draft in regimes.items()}
        self._streams = {name: _Stream.start(a) for name, a in self._alternatives.items()}
        self._plans = {name: a.empty_plan() for name, a in self._alternatives.items()}
        # Regimes without a draft have fewer alternatives; all can follow those that need none.
        self._common = Alternatives(all(regimes.values()))
        self._columns = {
            name: np.array([a.names.index(common) for common in self._common.names])
            for name, a in self._alternatives.items()
        }
        self._pooled = np.zeros(len(self._common.names))
        self._supremum = 0.0
        self._tokens_at_alarm: int | None = None

    @property
    def is_rejected(self) -> bool:
        """Whether the evidence has ever reached 1 / alpha."""
        return self._tokens_at_alarm is not None

    @property
    def tokens(self) -> int:
        """Tokens seen, over the regimes."""
        return sum(stream.tokens for stream in self._streams.values())

    @property
    def log_e_value(self) -> float:
        """The logarithm of the e-process as it stands."""
        parts = [_log_mean(stream.total()) for stream in self._streams.values()]
        if len(parts) > 1:
            parts.append(_log_mean(self._pooled))
        return float(_log_mean(np.array(parts)))

    def alternatives(self, regime: str) -> Alternatives:
        """Return the alternatives of a regime, to score tokens with."""
        return self._alternatives[regime]

    def observe(
        self,
        regime: str,
        p: Tensor,
        tokens: Tensor,
        q: Tensor | None = None,
        *,
        sequence: int,
        offset: int = 0,
    ) -> None:
        """Take some consecutive tokens of one sequence.

        Args:
            regime: Which stream they belong to.
            p: The target's processed distribution before each, `[T, V]`, float64, teacher-forced.
            tokens: What was emitted, `[T]` int64.
            q: The auditor's draft law, `[T, V]`, in a regime that has one.
            sequence: A number for the sequence; a new one says that the last is complete.
            offset: The place of the first of these tokens in the sequence.
        """
        alternatives = self._alternatives[regime]
        first = -self._streams[regime].tokens % self.plan_every
        scores = alternatives.score(p, tokens, q)
        plan = alternatives.plan(
            p[first :: self.plan_every], None if q is None else q[first :: self.plan_every]
        )
        places = np.arange(offset, offset + len(scores))
        self.update(regime, scores, np.full(len(scores), sequence), places, plan)

    def update(
        self,
        regime: str,
        scores: Scores,
        sequences: npt.ArrayLike,
        offsets: npt.ArrayLike,
        plan: Plan | None = None,
    ) -> FloatArray:
        """Take the scores of tokens, sequence by sequence, and what their contexts could have shown.

        Returns:
            Log e after each, `[T, 1 + regimes]`: of the whole, and of each regime alone.
        """
        if plan is not None:
            self.foresee(regime, plan)
        if len(scores) == 0:
            return np.zeros((0, 1 + len(self._streams)))
        stream = self._streams[regime]
        was_rejected = self.is_rejected
        path = own = _path(stream.total(), scores.log_factors)
        alone = [
            own if name == regime else np.full(len(own), _log_mean(s.total()))
            for name, s in self._streams.items()
        ]
        if len(self._streams) > 1:
            pooled = scores.log_factors[:, self._columns[regime]]
            path = _log_mean(np.stack([_path(self._pooled, pooled), *alone], -1))
            self._pooled = self._pooled + pooled.sum(0)
        reached = np.flatnonzero(path >= -math.log(self.alpha))
        if not self.is_rejected and len(reached):
            self._tokens_at_alarm = self.tokens + int(reached[0]) + 1
        self._supremum = max(self._supremum, float(path.max()))
        stream.take(scores, np.asarray(sequences), np.asarray(offsets), was_rejected)
        return np.stack([path, *alone], -1)

    def foresee(self, regime: str, plan: Plan) -> None:
        """Take what some contexts of a regime could have shown; of all its tokens they stand for."""
        self._plans[regime] = self._plans[regime] + plan

    def smallest_detectable_effect(self, direction: str, regime: str | None = None) -> Detectable | None:
        """Return the smallest mean TV per token of a direction that would have been found with chance .99.

        It is the distance at the smallest strength where the expected evidence of one of the direction's
        alternatives, less 2.33 standard deviations, reaches log(alternatives / alpha), summed over the
        contexts actually audited, with the streams that are averaged counted among the alternatives.
        Evidence is that of the alternative in the mixture, not of the unknown truth. Linear in between the
        strengths tried. None when no context was examined for it.

        Args:
            direction: A name among `alternatives.DIRECTIONS`.
            regime: The one regime in which the fault shows; None for a fault present in all alike.
        """
        names = list(self._streams) if regime is None else [regime]
        if any(direction not in self._plans[name].tv for name in names):
            return None
        planned = [name for name in names if self._plans[name].rows]
        if not planned:
            return None
        scales = {name: self._streams[name].tokens / self._plans[name].rows for name in planned}
        growth = np.sum([scales[name] * self._plans[name].growth[direction] for name in planned], axis=0)
        variance = np.sum([scales[name] * self._plans[name].variance[direction] for name in planned], axis=0)
        tv = np.sum([scales[name] * self._plans[name].tv[direction] for name in planned], axis=0)
        tokens = sum(self._streams[name].tokens for name in planned)
        alternatives = self._common if regime is None else self._alternatives[regime]
        averaged = len(self._streams) + (len(self._streams) > 1)
        bar = math.log(len(alternatives.names) * averaged / self.alpha)
        margin = np.max(growth - POWER_Z * np.sqrt(variance), axis=1) - bar
        distances = tv / tokens
        return Detectable(first_crossing(distances, margin), float(distances[-1]))

    def result(self) -> EProcessResult:
        """Return where the test stands, at any time."""
        regimes = tuple(self._regime_result(name) for name in self._streams)
        best = max(regimes, key=lambda regime: regime.best_log_evidence)
        return EProcessResult(
            alpha=self.alpha,
            is_rejected=self.is_rejected,
            log_e_value=self.log_e_value,
            log_supremum=self._supremum,
            tokens=self.tokens,
            tokens_at_alarm=self._tokens_at_alarm,
            unsupported=sum(regime.unsupported for regime in regimes),
            best_regime=best.regime,
            best_alternative=best.best_alternative,
            best_family=best.best_family,
            best_log_evidence=best.best_log_evidence,
            detectable={d.name: self.smallest_detectable_effect(d.name) for d in self._common.directions},
            regimes=regimes,
        )

    def _regime_result(self, name: str) -> RegimeResult:
        stream, alternatives = self._streams[name], self._alternatives[name]
        evidence = stream.total()
        best = int(evidence.argmax())
        worst = None
        if stream.largest[best] > 0:
            sequence, offset = stream.places[best].tolist()
            worst = Position(sequence, offset, float(stream.largest[best]))
        return RegimeResult(
            regime=name,
            tokens=stream.tokens,
            sequences=stream.sequences + (stream.current is not None),
            unsupported=stream.unsupported,
            log_e_value=float(_log_mean(evidence)),
            best_alternative=alternatives.names[best],
            best_family=alternatives.directions[alternatives.direction_of[best]].family,
            best_log_evidence=float(evidence[best]),
            effect=stream.effect(alternatives),
            worst=worst,
            detectable={
                d.name: self.smallest_detectable_effect(d.name, name) for d in alternatives.directions
            },
        )

    def state(self) -> dict[str, Any]:
        """Return everything needed to go on later, in JSON types."""
        return {
            "alpha": self.alpha,
            "plan_every": self.plan_every,
            "regimes": {name: a.has_draft for name, a in self._alternatives.items()},
            "names": {name: list(a.names) for name, a in self._alternatives.items()},
            "streams": {name: stream.plain() for name, stream in self._streams.items()},
            "plans": {name: _plain_plan(plan) for name, plan in self._plans.items()},
            "pooled": self._pooled.tolist(),
            "supremum": self._supremum,
            "tokens_at_alarm": self._tokens_at_alarm,
        }

    @classmethod
    def resume(cls, state: Mapping[str, Any]) -> EProcess:
        """Go on from a saved state.

        Raises:
            UsageError: it was saved by a version with other alternatives; their weights were fixed then.
        """
        process = cls(state["regimes"], alpha=state["alpha"], plan_every=state["plan_every"])
        if state["names"] != process.state()["names"]:
            raise UsageError(
                "the saved audit used other alternatives than this version; expected the same",
                hint="start the audit anew, or go on with the version that began it",
            )
        process._streams = {name: _Stream.from_plain(values) for name, values in state["streams"].items()}
        process._plans = {name: _plan_from(values) for name, values in state["plans"].items()}
        process._pooled = np.array(state["pooled"])
        process._supremum = state["supremum"]
        process._tokens_at_alarm = state["tokens_at_alarm"]
        return process


class MarginProcess:
    """An e-process for deviations beyond a margin: the evidence where p itself is known only roughly.

    Null hypothesis: given its past, no token is drawn from a law that gives the set A of any direction
    (what the direction makes more likely than p does) more than p(A) + `margin`. Each factor is
    1 + l (1[x in A] - p(A) - margin), averaged over directions and some l > 0; its expectation is then at
    most 1, and the chance that the product ever reaches 1 / alpha at most alpha. A reference that is off by
    no more than the margin in TV, per token, accuses nobody.

    It need not hold of every token: write b_t for how far the law of token t exceeds p(A). The product over
    1 + l (b_t - margin) is then what is a martingale, and it is no less than the evidence as long as the b_t
    so far sum to no more than their number times the margin, since 1 + x is at most e^x. So an alarm while
    the mean of b_t over the tokens so far has never exceeded the margin has probability at most alpha: a
    mean per token, measured, is a margin. What it must be the mean of is contexts like those audited.

    Invalid in the ways of `EProcess`, but for the precision of p. Not rejecting says less than there: a
    deviation must exceed the margin by about as much as `EProcess` needs to see it at all.

    References:
        Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, JRSS B 86 (2024).
    """

    stakes = (0.02, 0.05, 0.1, 0.2, 0.4)
    """The l: small ones for small deviations over many tokens."""

    def __init__(self, *, margin: float, alpha: float) -> None:
        if not 0 <= margin < 1:
            raise ValueError(f"the margin is {margin}; expected a distance in TV, at least 0 and below 1")
        self.margin = margin
        self.alpha = alpha
        self._evidence: FloatArray | None = None  # [stakes * directions]
        self._directions = 0
        self._supremum = 0.0

    @property
    def log_e_value(self) -> float:
        """The logarithm of the e-process as it stands."""
        return 0.0 if self._evidence is None else float(_log_mean(self._evidence))

    @property
    def log_supremum(self) -> float:
        """The largest that the logarithm of the e-process ever was."""
        return self._supremum

    @property
    def is_rejected(self) -> bool:
        """Whether the evidence has ever reached 1 / alpha."""
        return self._supremum >= -math.log(self.alpha)

    @property
    def best(self) -> int | None:
        """The index of the direction with the most evidence; None before any token."""
        return None if self._evidence is None else int(self._evidence.argmax()) % self._directions

    def update(self, scores: Scores) -> None:
        """Take the scores of tokens, in the order and with the completeness that `EProcess` asks for."""
        if len(scores) == 0:
            return
        self._directions = scores.witness.shape[1]
        excess = scores.witness - self.margin
        bets = np.concatenate([np.log1p(stake * excess) for stake in self.stakes], axis=1)
        before = np.zeros(bets.shape[1]) if self._evidence is None else self._evidence
        self._supremum = max(self._supremum, float(_path(before, bets).max()))
        self._evidence = before + bets.sum(0)

    def state(self) -> dict[str, Any]:
        """Return everything needed to go on later, in JSON types."""
        evidence = None if self._evidence is None else self._evidence.tolist()
        return {
            "margin": self.margin,
            "alpha": self.alpha,
            "evidence": evidence,
            "supremum": self._supremum,
        }

    @classmethod
    def resume(cls, state: Mapping[str, Any]) -> MarginProcess:
        """Go on from a saved state."""
        process = cls(margin=state["margin"], alpha=state["alpha"])
        process._evidence = None if state["evidence"] is None else np.array(state["evidence"])
        process._directions = 0 if process._evidence is None else len(process._evidence) // len(cls.stakes)
        process._supremum = state["supremum"]
        return process


def _log_mean(logs: FloatArray) -> FloatArray:
    """Return the logarithm of the mean of numbers given by their logarithms, over the last axis."""
    largest = logs.max(-1, keepdims=True)
    return np.asarray(largest.squeeze(-1) + np.log(np.exp(logs - largest).mean(-1)))


def _path(before: FloatArray, log_factors: FloatArray) -> FloatArray:
    """Return the logarithm of the mixture after each of T more tokens, `[T]`."""
    return _log_mean(before + log_factors.cumsum(0))


def first_crossing(tv: FloatArray, margin: FloatArray) -> float | None:
    """Return the distance at which the margin first reaches 0, along strengths from weak to strong."""
    reached = np.flatnonzero(margin >= 0)
    if len(reached) == 0:
        return None
    place = int(reached[0])
    if place == 0:
        return float(tv[0])
    below, above = margin[place - 1], margin[place]
    share = -below / (above - below)
    return float(tv[place - 1] + share * (tv[place] - tv[place - 1]))


def _plain_plan(plan: Plan) -> dict[str, Any]:
    sums = {"growth": plan.growth, "variance": plan.variance, "tv": plan.tv}
    plain = {key: {name: v.tolist() for name, v in values.items()} for key, values in sums.items()}
    return {"rows": plan.rows, **plain}


def _plan_from(values: Mapping[str, Any]) -> Plan:
    growth, variance, tv = (
        {name: np.array(v) for name, v in values[key].items()} for key in ("growth", "variance", "tv")
    )
    return Plan(values["rows"], growth, variance, tv)


def sequence_numbers(lengths: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Return, for sequences of some lengths laid end to end, each token's sequence and its offset there.

    >>> sequence_numbers([2, 1])
    (array([0, 0, 1]), array([0, 1, 0]))
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    starts = sizes.cumsum() - sizes
    return numbers, np.arange(len(numbers)) - starts[numbers]
