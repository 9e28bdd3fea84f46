"""The ways of being wrong that the primary test bets on: laws a(x) near the target's p(x), by family.

Knows the formula of every alternative and how to score many rows without holding an array per alternative.
All laws are functions of p (the target's processed distribution after a prefix) and q (the auditor's own
draft law there), hence of (prompt, x_<t) alone; none looks at what the decoder proposed or accepted.

Every family but *temper* has the form a(x) / p(x) = (c + e v(x)) / (c + e E_p v), with a strength e and a
contrast v that does not depend on it: v = r / p and c = 1 - e for a mixture (1 - e) p + e r, c = 1 for
p (1 + e v). So one contrast serves all strengths, normalisers are exact, and the evidence that an
alternative gathers when the truth has another strength is a ratio of two moments.

Of a large vocabulary unlikely ids are lumped first, and all this is said of symbols (`lumping`).

Laws are restricted to the support of p and normalised there: a token with p = 0 is the support test's
business. It cannot happen under the null, so leaving it out keeps the expectation of every factor at 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specbench.audit.lumping import LARGEST_WHOLE, Lumped, lump

FloatArray = npt.NDArray[np.float64]

MIX = 0.01
"""The share of p in every alternative: one unlikely token costs a factor of 100 at most, not everything."""
CHUNK_VALUES = 4 * 49_152
"""Probabilities worked on at a time: 1.5 MB per array in float64, which stays in cache. Sixteen times as many
take three times as long."""
LUMPED_VALUES = 64 * 49_152
"""The same where most of a row is only summed up: see `lumping`."""
MASS_TOLERANCE = 1e-4
"""How far a row's sum may be from 1 before it is refused; what is accepted is normalised in float64."""
SMALLEST = 1e-290
"""Probabilities below this are 0: a ratio to them would overflow."""
NO_MASS = 1e-9
"""A law with less mass than this on the support says nothing about it; the alternative is then p itself."""


@dataclass(frozen=True, slots=True)
class Direction:
    """A way of being wrong, of any strength; each of `strengths` is one alternative of the mixture.

    The strength is the exponent for *temper* and e elsewhere. `truths` are the strengths at which the
    smallest detectable effect is looked for, from weak to strong.
    """

    name: str
    family: str
    strengths: tuple[float, ...]
    truths: tuple[float, ...]
    needs_draft: bool
    catches: str

    @property
    def is_power(self) -> bool:
        """Whether the strength is an exponent of p."""
        return self.family == "temper"


_E = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03,
    0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0,
)  # fmt: skip
_HOT = (0.995, 0.99, 0.98, 0.97, 0.95, 0.93, 0.9, 0.85, 0.8, 0.7, 0.5, 0.3)
_COLD = (1.005, 1.01, 1.02, 1.03, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)

DIRECTIONS = (
    Direction("temper-hot", "temper", (0.7, 0.9, 0.97), _HOT, False, "temperature not applied, foreign rows"),
    Direction("temper-cold", "temper", (1.03, 1.1, 1.3), _COLD, False, "temperature too low, greedy drafts"),
    Direction("draft-mix", "draft mix", (0.02, 0.1, 0.3, 1.0), _E, True, "draft tokens let through"),
    Direction("lean-to-draft", "lean", (0.03, 0.1, 0.3), _E, True, "acceptance ratio too generous"),
    Direction("lean-from-draft", "lean", (0.03, 0.1, 0.3), _E, True, "acceptance ratio too strict"),
    Direction("uniform-mix", "uniform mix", (0.003, 0.01, 0.05), _E, False, "corruption, padding ids"),
    Direction("id-up", "id tilt", (0.05, 0.2), _E, False, "coin reuse with inverse-CDF sampling"),
    Direction("id-down", "id tilt", (0.05, 0.2), _E, False, "coin reuse with inverse-CDF sampling"),
    Direction("loser-up", "loser tilt", (0.05, 0.2), _E, True, "numbers shared by draft and residual"),
    Direction("loser-down", "loser tilt", (0.05, 0.2), _E, True, "numbers shared by draft and residual"),
    Direction("greedy-mix", "greedy mix", (0.015, 0.05, 0.2), _E, False, "greedy instead of sampling"),
    Direction("residual-from-p", "mechanistic", (0.1, 0.3, 1.0), _E, True, "recovered token sampled from p"),
    Direction("draft-number-reused", "mechanistic", (0.1, 0.3, 1.0), _E, True, "draft's number draws again"),
    Direction("residual-argmax", "mechanistic", (0.03, 0.1, 0.3, 1.0), _E, True, "greedy recovered token"),
)  # fmt: skip


class _Rows:
    """Some rows of p and q [n, vocab], restricted to the support of p, with what the contrasts share."""

    def __init__(self, p: Tensor, q: Tensor | None, lumped: Lumped | None = None) -> None:
        self.vocab = p.shape[-1]
        self.lumped = lumped
        if lumped is not None:
            p, q = lumped.p, lumped.q
        self.p = _law(p, "p")
        self.support = self.p > 0
        self._whole_q = None if q is None else _law(q, "q")
        self._q = None if self._whole_q is None else self._whole_q * self.support

    @classmethod
    def of(cls, p: Tensor, q: Tensor | None) -> _Rows:
        """Return rows whose columns are symbols, if the vocabulary is large, and ids otherwise."""
        if p.shape[-1] <= LARGEST_WHOLE:
            return cls(p, q)
        if bool((p.amin() if q is None else torch.minimum(p.amin(), q.amin())) < 0):
            raise ValueError("a row of p or q is no distribution; a probability is negative")
        return cls(p, q, lump(p.double(), None if q is None else q.double(), smallest=SMALLEST))

    def places(self, tokens: Tensor) -> Tensor:
        """Return the columns that hold tokens [n]."""
        return tokens if self.lumped is None else self.lumped.symbols(tokens)

    def columns(self, law: Tensor) -> Tensor:
        """Return another law [n, vocab] by columns."""
        return law if self.lumped is None else self.lumped.lump(law)

    @property
    def q(self) -> Tensor:
        """The draft's law on the support of p; not renormalised."""
        if self._q is None:
            raise ValueError("this alternative needs the draft's law q")
        return self._q

    @property
    def whole_q(self) -> Tensor:
        """The draft's law, also off the support."""
        if self._whole_q is None:
            raise ValueError("this alternative needs the draft's law q")
        return self._whole_q

    @cached_property
    def _p_or_1(self) -> Tensor:
        """p, and 1 outside the support. Sums and products: `torch.where` takes ten times as long."""
        return self.p + ~self.support

    @cached_property
    def over_p(self) -> Tensor:
        """1 / p, and 0 outside the support."""
        return self.support / self._p_or_1

    @cached_property
    def log_p(self) -> Tensor:
        """Log p of each of a column's ids, and 0 outside the support."""
        return (self._p_or_1 / self.count.clamp(min=1)).log() if self.lumped else self._p_or_1.log()

    @property
    def count(self) -> Tensor:
        """How many possible ids each column holds."""
        return self.support if self.lumped is None else self.lumped.count

    @cached_property
    def lean(self) -> Tensor:
        """Half of s: (q - p) / (q + p), between -1 and 1."""
        return (self.q - self.p) / (self.q + self._p_or_1)

    @cached_property
    def mid_rank(self) -> Tensor:
        """The token's place in the CDF taken in id order, scaled to [-1, 1]."""
        return (2 * self.p.cumsum(-1) - self.p - 1) * self.support

    @cached_property
    def lost(self) -> Tensor:
        """(q / p) 1[p > q]: the chance that a token the draft undervalues was proposed, given p."""
        return self.q * self.over_p * (self.p > self.q)

    @cached_property
    def overlap(self) -> Tensor:
        """min(p, q)."""
        return torch.minimum(self.p, self.q)

    @cached_property
    def beta(self) -> Tensor:
        """Sum of min(p, q): the chance of acceptance, [n, 1]."""
        return self.overlap.sum(-1, keepdim=True)

    def top(self, weights: Tensor) -> Tensor:
        """The point mass on the id with the largest of some weights."""
        if self.lumped is not None:
            weights = weights * (self.lumped.count <= 1)
        return torch.zeros_like(weights).scatter_(-1, weights.argmax(-1, keepdim=True), 1.0)


def _number_reused(rows: _Rows) -> Tensor:
    """Return the law of what is emitted if the number that drew the rejected draft also draws the recovered.

    Both by inverse CDF in id order: given a rejection the number is not uniform but has density
    (1 - p / q)+ of the token it drew; `lost` integrates that, and R, the residual's CDF, says which
    numbers give which token.
    """
    p, q = rows.p, rows.whole_q
    residual = (p - q).clamp_(min=0)
    mass = residual.sum(-1, keepdim=True)
    residual_cdf = residual.cumsum(-1) / mass.clamp(min=SMALLEST)
    edges = q.cumsum(-1)
    lost = (q - p).clamp_(min=0)
    token = torch.searchsorted(edges, residual_cdf).clamp_(max=p.shape[-1] - 1)
    into = residual_cdf - (edges - q).gather(-1, token)
    density = lost.gather(-1, token) / q.gather(-1, token).clamp(min=SMALLEST)
    integral = (lost.cumsum(-1) - lost).gather(-1, token) + into.clamp_(min=0) * density
    # The integral of a density up to growing edges grows; rounding must not make a probability negative.
    recovered = integral.diff(dim=-1, prepend=torch.zeros_like(mass)).clamp_(min=0)
    return rows.overlap + recovered * (residual > 0)


_MIXED_IN: dict[str, Callable[[_Rows], Tensor]] = {
    "draft-mix": lambda r: r.q,
    "uniform-mix": lambda r: r.count.double() / r.vocab,
    "greedy-mix": lambda r: r.top(r.p),
    "residual-from-p": lambda r: r.overlap + (1 - r.beta) * r.p,
    "draft-number-reused": _number_reused,
    "residual-argmax": lambda r: r.overlap + (1 - r.beta) * r.top((r.p - r.q).clamp_(min=0)),
}
"""The law r of the mixtures (1 - e) p + e r; it may miss the mass that lies outside the support."""

_TILTED_BY: dict[str, Callable[[_Rows], Tensor]] = {
    "lean-to-draft": lambda r: r.lean,
    "lean-from-draft": lambda r: -r.lean,
    "id-up": lambda r: r.mid_rank,
    "id-down": lambda r: -r.mid_rank,
    "loser-up": lambda r: r.lost,
    "loser-down": lambda r: -r.lost,
}
"""The contrast v of the tilts p (1 + e v), between -1 and 1."""

_MIRRORED: dict[str, str] = {
    "temper-cold": "temper-hot",
    "lean-from-draft": "lean-to-draft",
    "id-down": "id-up",
    "loser-down": "loser-up",
}
"""Directions that favour what another does not: the contrast is its negative, the set A its complement."""


@dataclass(frozen=True)
class _Contrast:
    """v on the support [n, vocab], p v (finite where v is huge) and its sum [n, 1]."""

    v: Tensor
    weighted: Tensor
    mean: Tensor
    is_mixture: bool

    @classmethod
    def of(cls, name: str, rows: _Rows) -> _Contrast:
        if name in _MIXED_IN:
            law = _MIXED_IN[name](rows)
            return cls(law * rows.over_p, law, law.sum(-1, keepdim=True), True)
        v = _TILTED_BY[name](rows)
        weighted = rows.p * v
        return cls(v, weighted, weighted.sum(-1, keepdim=True), False)

    def ratio(self, strength: float, v: Tensor) -> Tensor:
        """Return a / p where the contrast is `v` [n, ...]."""
        constant = self.constant(strength)
        norm = constant + strength * self.mean
        ratio = (constant + strength * v) / norm.clamp(min=NO_MASS)
        empty = norm < NO_MASS
        return torch.where(empty, 1.0, ratio) if bool(empty.any()) else ratio

    def constant(self, strength: float) -> float:
        return 1 - strength if self.is_mixture else 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What the alternatives would have earned on some contexts if the truth were one of a direction's laws.

    Sums over `rows` contexts. Per direction: `growth` and `variance` `[truths, strengths]`, mean and
    variance of log a_k(x) / p(x) for x drawn from the truth; `tv` `[truths]`, the TV distance of the truth
    from p. Truths are not mixed with p; alternatives are.
    """

    rows: int
    growth: dict[str, FloatArray]
    variance: dict[str, FloatArray]
    tv: dict[str, FloatArray]

    def __add__(self, other: Plan) -> Plan:
        """Add the sums over other contexts."""
        return Plan(
            self.rows + other.rows,
            {name: self.growth[name] + other.growth[name] for name in self.growth},
            {name: self.variance[name] + other.variance[name] for name in self.variance},
            {name: self.tv[name] + other.tv[name] for name in self.tv},
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """What T observed tokens say about each alternative.

    `log_factors` `[T, alternatives]`: log a(x) / p(x). `witness` `[T, directions]`: 1[x in A] - p(A), where
    A holds the tokens that the direction makes more likely; its mean is a lower estimate of the distance
    in TV, and 0 under the null. Both are 0 where `supported` `[T]` is false: the token has p = 0.
    """

    log_factors: FloatArray
    witness: FloatArray
    supported: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        """Return T."""
        return len(self.supported)

    def take(self, places: npt.NDArray[np.int64] | slice) -> Scores:
        """Return the scores at some places."""
        return Scores(self.log_factors[places], self.witness[places], self.supported[places])


@dataclass(frozen=True)
class Alternatives:
    """The alternatives that can be used: all of them, or without a draft those that need none."""

    has_draft: bool
    directions: tuple[Direction, ...] = field(init=False)

    def __post_init__(self) -> None:
        usable = tuple(d for d in DIRECTIONS if self.has_draft or not d.needs_draft)
        object.__setattr__(self, "directions", usable)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The name of every alternative, `direction:strength`."""
        return tuple(f"{d.name}:{strength:g}" for d, strength in self._pairs)

    @cached_property
    def direction_of(self) -> tuple[int, ...]:
        """The index of every alternative's direction."""
        return tuple(place for place, d in enumerate(self.directions) for _ in d.strengths)

    @property
    def _pairs(self) -> Iterator[tuple[Direction, float]]:
        return ((d, strength) for d in self.directions for strength in d.strengths)

    def score(self, p: Tensor, tokens: Tensor, q: Tensor | None = None) -> Scores:
        """Score observed tokens under every alternative.

        Args:
            p: The target's processed distribution at each token, `[T, V]`, float64.
            tokens: What was emitted there, `[T]`, int64.
            q: The auditor's own draft law there, `[T, V]`; required exactly if `has_draft`.

        Raises:
            ValueError: p or q is no distribution.
        """
        parts = [
            self._score(rows, tokens[start : start + len(rows.p)].to(rows.p.device))
            for start, rows in self._chunks(p, q)
        ]
        if not parts:
            empty = np.zeros((0, len(self.names)))
            return Scores(empty, np.zeros((0, len(self.directions))), np.zeros(0, dtype=np.bool_))
        factors, witness, supported = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
        return Scores(factors, witness, supported)

    def table(self, p: Tensor, q: Tensor | None = None) -> Scores:
        """Score every token of every row: row i, token x is at place i V + x."""
        rows, vocab = p.shape
        step = max(1, CHUNK_VALUES // vocab**2)
        tokens = torch.arange(vocab).repeat(min(step, rows))
        parts = []
        for start in range(0, rows, step):
            own = p[start : start + step].repeat_interleave(vocab, 0)
            drafts = None if q is None else q[start : start + step].repeat_interleave(vocab, 0)
            parts.append(self.score(own, tokens[: len(own)], drafts))
        return Scores(*(np.concatenate([getattr(s, name) for s in parts]) for name in Scores.__slots__))

    def law(self, direction: str, strength: float, p: Tensor, q: Tensor | None = None) -> Tensor:
        """Return the law of a direction at some strength `[T, V]`, not mixed with p: to read and to test."""
        rows = _Rows(p, q)
        if next(d for d in self.directions if d.name == direction).is_power:
            return rows.p * _power_ratio(rows, strength, rows.log_p)
        contrast = _Contrast.of(direction, rows)
        return rows.p * contrast.ratio(strength, contrast.v)

    def shifts(self, p: Tensor, q: Tensor | None, laws: Sequence[Tensor]) -> FloatArray:
        """Return by how much other laws exceed p on each direction's set A `[T, laws, directions]`.

        A is as in `Scores.witness`: the expectation of that under a law, instead of its value at a token.

        Args:
            p: `[T, V]`, as in `score`.
            q: `[T, V]`, as in `score`.
            laws: Distributions `[T, V]` float64.
        """
        parts = []
        for start, rows in self._chunks(p, q):
            others = [rows.columns(law[start : start + len(rows.p)].to(rows.p)) for law in laws]
            excess = torch.stack([other - rows.p for other in others], 1)
            sets = [_favoured(d, rows).double() for d in self.directions]
            parts.append(torch.stack([torch.einsum("nlv,nv->nl", excess, a) for a in sets], -1))
        return np.asarray(torch.cat(parts).cpu().numpy())

    def plan(self, p: Tensor, q: Tensor | None = None) -> Plan:
        """Sum, over contexts, what every alternative would earn if a direction were true: see `Plan`.

        Args:
            p: `[T, V]`, as in `score`.
            q: `[T, V]`, as in `score`.
        """
        plan = self.empty_plan()
        for _, rows in self._chunks(p, q):
            for direction in self.directions:
                planned = _plan_power if direction.is_power else _plan_contrast
                growth, second, tv = planned(direction, rows)
                variance = (second - growth**2).clamp(min=0)
                plan.growth[direction.name][:] += growth.sum(0).cpu().numpy()
                plan.variance[direction.name][:] += variance.sum(0).cpu().numpy()
                plan.tv[direction.name][:] += tv.sum(0).cpu().numpy()
        return Plan(len(p), plan.growth, plan.variance, plan.tv)

    def empty_plan(self) -> Plan:
        """Return the plan of no context at all."""
        shapes = {d.name: (len(d.truths), len(d.strengths)) for d in self.directions}
        return Plan(
            0,
            {name: np.zeros(shape) for name, shape in shapes.items()},
            {name: np.zeros(shape) for name, shape in shapes.items()},
            {name: np.zeros(shape[0]) for name, shape in shapes.items()},
        )

    def _chunks(self, p: Tensor, q: Tensor | None) -> Iterator[tuple[int, _Rows]]:
        if self.has_draft == (q is None):
            raise ValueError(f"q is {'missing' if q is None else 'given'}; has_draft is {self.has_draft}")
        if q is not None and q.shape != p.shape:
            raise ValueError(f"q has shape {tuple(q.shape)}; expected that of p, {tuple(p.shape)}")
        step = max(1, (LUMPED_VALUES if p.shape[-1] > LARGEST_WHOLE else CHUNK_VALUES) // p.shape[-1])
        for start in range(0, len(p), step):
            stop = start + step
            yield start, _Rows.of(p[start:stop], None if q is None else q[start:stop])

    def _score(self, rows: _Rows, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log factors [n, alternatives], witnesses [n, directions] and support [n] of one chunk."""
        at = rows.places(tokens)[:, None]
        factors: list[Tensor] = []
        witness: dict[str, Tensor] = {}
        contrasts: dict[str, tuple[_Contrast, Tensor]] = {}
        for direction in self.directions:
            name, source = direction.name, _MIRRORED.get(direction.name, direction.name)
            sign = 1.0 if name == source else -1.0
            if direction.is_power:
                log_p = rows.log_p.gather(1, at)
                factors += [_power_ratio(rows, strength, log_p) for strength in direction.strengths]
            else:
                if source not in contrasts:
                    contrast = _Contrast.of(source, rows)
                    contrasts[source] = contrast, contrast.v.gather(1, at)
                contrast, v = contrasts[source]
                factors += [contrast.ratio(sign * strength, v) for strength in direction.strengths]
            if name == source:
                favoured = _favoured(direction, rows, None if direction.is_power else contrast)
                expected = (rows.p * favoured).sum(-1, keepdim=True)
                witness[name] = favoured.gather(1, at).double() - expected
            else:
                witness[name] = -witness[source]
        supported = rows.support.gather(1, at)
        ratios = _mixed(torch.cat(factors, 1)).log() * supported
        return ratios, torch.cat(list(witness.values()), 1) * supported, supported.squeeze(1)


def _law(probs: Tensor, name: str) -> Tensor:
    """Check that rows are distributions, in float64, and normalise them."""
    law = probs.to(torch.float64)
    mass = law.sum(-1, keepdim=True)
    if not bool((law >= 0).all()) or not bool(((mass - 1).abs() <= MASS_TOLERANCE).all()):
        raise ValueError(f"a row of {name} is no distribution; its sum must be 1 within {MASS_TOLERANCE:g}")
    law = law / mass
    return law * (law >= SMALLEST)


def _mixed(ratio: Tensor) -> Tensor:
    return (1 - MIX) * ratio + MIX


def _unlikely(rows: _Rows) -> Tensor:
    """Tokens more surprising than the average one: what a slightly higher temperature makes more likely."""
    return rows.log_p < (rows.p * rows.log_p).sum(-1, keepdim=True)


def _favoured(direction: Direction, rows: _Rows, contrast: _Contrast | None = None) -> Tensor:
    """Return A, the tokens that a direction makes more likely, `[n, vocab]` bool."""
    if source := _MIRRORED.get(direction.name):
        return ~_favoured(next(d for d in DIRECTIONS if d.name == source), rows) & rows.support
    if direction.is_power:
        return _unlikely(rows) & rows.support
    contrast = contrast or _Contrast.of(direction.name, rows)
    return (contrast.v > contrast.mean) & rows.support


def _powers(rows: _Rows, exponent: float) -> tuple[Tensor, Tensor]:
    """Return p^b on the support [n, vocab] and its sum [n, 1]."""
    powers = (exponent * rows.log_p).exp_() * rows.count
    return powers, powers.sum(-1, keepdim=True)


def _power_ratio(rows: _Rows, exponent: float, log_p: Tensor) -> Tensor:
    """Return a / p at tokens whose log p is given, `[n, ...]`."""
    return ((exponent - 1) * log_p).exp() / _powers(rows, exponent)[1]


def _plan_power(direction: Direction, rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return first and second moments [n, truths, strengths] and TV [n, truths] of *temper*."""
    logs = [_mixed(_power_ratio(rows, strength, rows.log_p)).log_() for strength in direction.strengths]
    first, second, tv = [], [], []
    for exponent in direction.truths:
        powers, norm = _powers(rows, exponent)
        truth = powers / norm
        tv.append((truth - rows.p).abs().sum(-1) / 2)
        first.append(torch.stack([_dot(truth, log) for log in logs], -1))
        second.append(torch.stack([_dot(truth * log, log) for log in logs], -1))
    return torch.stack(first, 1), torch.stack(second, 1), torch.stack(tv, 1)


def _plan_contrast(direction: Direction, rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same of a direction that is linear in its strength: moments under p and p v suffice."""
    contrast = _Contrast.of(direction.name, rows)
    logs = [_mixed(contrast.ratio(strength, contrast.v)).log_() for strength in direction.strengths]
    plain = torch.stack([_dot(rows.p, log) for log in logs], -1)
    tilted = torch.stack([_dot(contrast.weighted, log) for log in logs], -1)
    plain_second = torch.stack([_dot(rows.p * log, log) for log in logs], -1)
    tilted_second = torch.stack([_dot(contrast.weighted * log, log) for log in logs], -1)
    spread = (contrast.weighted - rows.p * contrast.mean).abs().sum(-1) / 2
    first, second, tv = [], [], []
    for strength in direction.truths:
        constant = contrast.constant(strength)
        norm = constant + strength * contrast.mean
        empty = norm < NO_MASS  # the truth is then p itself
        norm = torch.where(empty, 1.0, norm)
        weight = torch.where(empty, 0.0, torch.full_like(norm, strength))
        base = torch.where(empty, 1.0, torch.full_like(norm, constant))
        first.append((base * plain + weight * tilted) / norm)
        second.append((base * plain_second + weight * tilted_second) / norm)
        tv.append((weight / norm).squeeze(-1) * spread)
    return torch.stack(first, 1), torch.stack(second, 1), torch.stack(tv, 1)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Sum of products over the vocabulary, [n]."""
    return torch.einsum("nv,nv->n", left, right)
