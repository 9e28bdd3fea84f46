"""An independent speculative decoder on toy language models, thousands of sequences at a time.

The statistics of the audit are checked here, where every probability is a table entry: error rates under
lossless rules, and how soon each fault of FAULTS.md is found. Shares no code with `decoding`: two
implementations of one paper that agree are worth more than one.

Symbols: p is the target's law, q the draft's, both `[contexts, vocab]`; the context of a token is a hash of
the two tokens before it. Sampling is by inverse CDF, since some faults show only with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from specbench.audit import regimes
from specbench.audit.alternatives import Alternatives, Scores
from specbench.audit.e_process import EProcess

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_T = TypeVar("_T", bound=np.generic)

Rule = Literal["rejection", "exact", "block", "tree", "argmax", "ema", "stop"]
RULES: tuple[Rule, ...] = ("rejection", "exact", "block", "tree", "argmax", "ema", "stop")
"""Lossless, all of them: token-wise rejection, exact match, block verification, a tree of width 2 drawn
without replacement, argmax drafts with a one-hot q, draft lengths that follow past acceptances, and a
draft that stops after a token of low confidence and keeps it."""

CONFIDENCE = 0.3
EMA_WEIGHT = 0.3


# Models


@dataclass(frozen=True)
class ToyPair:
    """A target and a draft as tables `[contexts, vocab]` float64.

    The context after tokens ..., a, b is (`order[0]` a + `order[1]` b) mod contexts.
    """

    p: FloatArray
    q: FloatArray
    order: tuple[int, int] = (40_503, 30_011)

    @classmethod
    def make(
        cls,
        vocab: int = 64,
        *,
        acceptance: float = 0.7,
        contexts: int = 256,
        seed: int = 0,
        spread: tuple[float, float] = (0.5, 3.0),
    ) -> ToyPair:
        """Draw a target with flat and peaked contexts, and a draft of the wanted acceptance.

        Args:
            vocab: Number of tokens.
            acceptance: Mean of sum min(p, q) over contexts; 1 makes the draft equal to the target.
            contexts: Number of rows.
            seed: Of the target's logits; pairs of one seed share their target.
            spread: Least and largest standard deviation of a row's logits.
        """
        generator = torch.Generator().manual_seed(seed)
        scales = torch.linspace(*spread, contexts, dtype=torch.float64)
        logits = torch.randn(contexts, vocab, generator=generator, dtype=torch.float64) * scales[:, None]
        scale = regimes.calibrate(logits, acceptance)
        draft = regimes.draft_logits(logits, torch.arange(contexts), scale)
        return cls(logits.softmax(-1).numpy(), draft.softmax(-1).numpy())

    def with_argmax_draft(self) -> ToyPair:
        """Return the pair whose draft is certain of its most likely token: q is one-hot."""
        return replace(self, q=one_hot(self.q))

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return int(self.p.shape[1])

    def context(self, before: IntArray, last: IntArray) -> IntArray:
        """Return the context after two tokens."""
        return (self.order[0] * before + self.order[1] * last) % len(self.p)

    @cached_property
    def scores(self) -> Scores:
        """Scores of every token in every context: row `context * vocab + token`."""
        return Alternatives(has_draft=True).table(torch.from_numpy(self.p), torch.from_numpy(self.q))


def one_hot(law: FloatArray) -> FloatArray:
    """Return the point mass on the most likely token of each row."""
    return np.asarray(np.eye(law.shape[1])[law.argmax(1)])


def power(law: FloatArray, exponent: float) -> FloatArray:
    """Return each row to a power, normalised: temperature 1 / exponent."""
    raised = law**exponent
    return np.asarray(raised / raised.sum(1, keepdims=True))


def top(law: FloatArray, k: int) -> FloatArray:
    """Return each row cut to its k most likely tokens, normalised."""
    floor = np.sort(law, 1)[:, -k, None]
    kept = np.where(law >= floor, law, 0.0)
    return np.asarray(kept / kept.sum(1, keepdims=True))


# Faults


@dataclass(frozen=True, slots=True)
class Judged:
    """What an accept test may look at, all `[rows, k]`: p(d), q(d), the coin, and the entropy of p."""

    p: FloatArray
    q: FloatArray
    coins: FloatArray
    entropy: FloatArray


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule broken in an otherwise correct decoder (token-wise rejection); None leaves it as it is.

    Args:
        kind: The class in FAULTS.md.
        regime: The draft regime in which it shows best.
        keep: The accept test.
        coins: Changes the coins `[rows, k]`; also given the numbers that drew the drafts `[rows, k]`.
        recovered: Weights `[n, vocab]` of the token after a rejection, from p, q and the rejected token.
        bonus: Weights of the token after a full acceptance, from p of its row, p of the row before, and q.
        drawn: The laws that drafts really come from, given q; q is still what is claimed.
        used: The laws the decoder takes for the target's, given p.
        reuse: What draws the recovered token: the number of the rejected draft, that of its coin, or the
            exponential variables of the race that drew the draft (as samplers on GPUs draw).
        drop_below: A sampled draft token is dropped, with all after it, if its q is below this.
        leak: Share of rejections after which the rejected token stays in the target's context for a step.
        corrupted: Share of emitted tokens replaced by token 0.
    """

    kind: str = "none"
    regime: str = "good"
    keep: Callable[[Judged], BoolArray] | None = None
    coins: Callable[[FloatArray, FloatArray], FloatArray] | None = None
    recovered: Callable[[FloatArray, FloatArray, IntArray], FloatArray] | None = None
    bonus: Callable[[FloatArray, FloatArray, FloatArray], FloatArray] | None = None
    drawn: Callable[[FloatArray], FloatArray] | None = None
    used: Callable[[FloatArray], FloatArray] | None = None
    reuse: Literal["draft", "coin", "race"] | None = None
    drop_below: float = 0.0
    leak: float = 0.0
    corrupted: float = 0.0


NO_FAULT = Fault()


def _without(p: FloatArray, tokens: IntArray) -> FloatArray:
    weights = p.copy()
    weights[np.arange(len(p)), tokens] = 0
    return weights


def _typical(at: Judged) -> BoolArray:
    """Typical acceptance (Cai et al. 2401.10774) at its published constants."""
    return at.p > np.minimum(0.09, 0.3 * np.exp(-at.entropy))


FAULTS: Mapping[str, Fault] = {
    "accept-all": Fault("accept test", "bad", keep=lambda at: np.ones_like(at.p, dtype=bool)),
    "threshold": Fault("accept test", keep=lambda at: at.p > 0.3),
    "typical": Fault("accept test", "bad", keep=_typical, recovered=lambda p, q, d: p),
    "ratio-1.1": Fault("accept test", keep=lambda at: at.coins * at.q < 1.1 * at.p),
    "ratio-0.9": Fault("accept test", keep=lambda at: at.coins * at.q < 0.9 * at.p),
    "slack-0.05": Fault("accept test", "bad", keep=lambda at: (at.coins - 0.05) * at.q < at.p),
    "forgot-q": Fault("accept test", keep=lambda at: at.coins < at.p),
    "p-at-least-q": Fault("accept test", keep=lambda at: at.p >= at.q),
    "coin-zero": Fault("accept test", "bad", coins=lambda coins, _: np.zeros_like(coins)),
    "coin-reused": Fault(
        "accept test", "bad", coins=lambda coins, _: np.repeat(coins[:, :1], coins.shape[1], 1)
    ),
    "residual-p": Fault("residual", recovered=lambda p, q, d: p),
    "residual-p-without-draft": Fault("residual", recovered=lambda p, q, d: _without(p, d)),
    "residual-absolute": Fault("residual", "bad", recovered=lambda p, q, d: np.abs(p - q)),
    "residual-argmax": Fault("residual", "bad", recovered=lambda p, q, d: one_hot(p - q)),
    "residual-q": Fault("residual", "bad", recovered=lambda p, q, d: q),
    "p-and-q-swapped": Fault(
        "residual",
        keep=lambda at: at.coins * at.p < at.q,
        recovered=lambda p, q, d: np.maximum(q - p, 0) + 1e-12 * p,
    ),
    "greedy-draft": Fault("proposal q", "self", drawn=one_hot),
    "draft-cooler": Fault("proposal q", "self", drawn=lambda q: power(q, 1.25)),
    "draft-top-8": Fault("proposal q", "self", drawn=lambda q: top(q, 8)),
    "draft-dropped": Fault("proposal q", "self", drop_below=0.1),
    "bonus-previous-row": Fault("bonus row", "self", bonus=lambda p, before, q: before),
    "bonus-from-q": Fault("bonus row", "good", bonus=lambda p, before, q: q),
    "bonus-argmax": Fault("bonus row", "self", bonus=lambda p, before, q: one_hot(p)),
    "rejected-visible": Fault("KV state", "bad", leak=0.3),
    "temperature": Fault("parameters", "self", used=lambda p: power(p, 1 / 1.1)),
    "temperature-bonus": Fault("parameters", "self", bonus=lambda p, before, q: power(p, 1 / 1.3)),
    "padding-id": Fault("batch", "self", corrupted=0.01),
    "draft-number-reused": Fault("randomness", reuse="draft"),
    "draft-race-reused": Fault("randomness", "bad", reuse="race"),
    "coin-reused-for-residual": Fault("randomness", reuse="coin"),
    "coin-is-draft-number": Fault("randomness", coins=lambda _, numbers: numbers),
}
"""Faults by name; a test runs all of them."""


# The decoder


@dataclass(frozen=True, slots=True)
class Rounds:
    """What speculation did, one row per step and sequence, in step order.

    `sequence`, `start` (offset of the round's first token), `offered` and `accepted` are `[R]`; a round
    emits accepted + 1 tokens, of which the last may lie beyond the sequence's end. The others are
    `[R, k]`, `[R, k + 1]` for trees, whose last column is the second sibling at the level of the first
    rejection: `drafted`, `context` (of each drafted token), `p` and `q` (claimed) of it, given the siblings
    before it; `tested` and `kept`. Entries that were not offered are not tested.
    """

    sequence: IntArray
    start: IntArray
    offered: IntArray
    accepted: IntArray
    drafted: IntArray
    context: IntArray
    p: FloatArray
    q: FloatArray
    tested: BoolArray
    kept: BoolArray

    def of(self, chosen: BoolArray) -> Rounds:
        """Return some of the rounds."""
        return Rounds(*(getattr(self, name)[chosen] for name in self.__slots__))

    @property
    def acceptance_rate(self) -> float:
        """Accepted / offered."""
        return float(self.accepted.sum() / max(1, self.offered.sum()))


@dataclass(frozen=True, slots=True)
class Decoded:
    """Emitted tokens and their contexts `[sequences, length]`, of which the first `lengths` count."""

    tokens: IntArray
    context: IntArray
    lengths: IntArray
    rounds: Rounds

    def flat(self, first: int, last: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Return sequence, offset, context and token of what sequences `first` to `last` - 1 emitted."""
        offsets = np.arange(self.tokens.shape[1])
        row, offset = np.nonzero(offsets < self.lengths[first:last, None])
        row = row + first
        return row, offset, self.context[row, offset], self.tokens[row, offset]


def decode(
    pair: ToyPair,
    rng: np.random.Generator,
    *,
    sequences: int,
    length: int,
    k: int = 4,
    rule: Rule = "rejection",
    fault: Fault = NO_FAULT,
    eos: int | None = None,
    prompts: IntArray | None = None,
) -> Decoded:
    """Decode sequences from prompts of two tokens.

    The first token is sampled from the prefill; every round then drafts k tokens, emits those accepted and
    one more. Sources: Leviathan et al. 2211.17192 (rejection; their p, q are ours); Sun et al. 2403.10444
    (block; their M_b is p, M_s is q); SpecInfer 2305.09781 (tree).

    Args:
        pair: Target and draft. For the rule `argmax` give it an argmax draft.
        rng: Source of all random numbers.
        sequences: Number of sequences.
        length: Tokens of each; less where it ends in EOS, which is included.
        k: Longest draft.
        rule: How drafts are made and verified.
        fault: One thing that is done wrong; only the rules built on token-wise rejection can have one.
        eos: The token that ends a sequence.
        prompts: `[sequences, 2]`; drawn at random if None.
    """
    if fault is not NO_FAULT and rule not in ("rejection", "argmax", "ema", "stop"):
        raise ValueError(f"the rule '{rule}' cannot carry a fault; expected one of token-wise rejection")
    return _Decoder(pair, rng, k, rule, fault).run(sequences, length, eos, prompts)


def audits(
    pairs: Mapping[str, ToyPair],
    rng: np.random.Generator,
    *,
    number: int,
    budget: int,
    alpha: float,
    length: int = 100,
    k: int = 4,
    rule: Rule = "rejection",
    fault: Fault = NO_FAULT,
    eos: int | None = None,
    turn: int = 1,
    plan: bool = False,
) -> Iterator[EProcess]:
    """Yield independent audits of one decoder, each stopped at its alarm or when its sequences are used up.

    Args:
        pairs: One pair per draft regime. Under the rule `argmax` their drafts are replaced.
        rng: Source of all random numbers.
        number: How many audits.
        budget: Tokens of one audit over its regimes; so many sequences are enrolled as should make them.
        alpha: Level of each audit.
        length: Tokens of a sequence, unless `eos` ends it.
        k: Longest draft.
        rule: See `decode`.
        fault: See `decode`.
        eos: See `decode`.
        turn: Sequences of one regime before the next has its turn; an audit that alarms ends with its turn.
        plan: Also compute what could have been found, which takes longer than the audit.
    """
    if rule == "argmax":
        pairs = {name: pair.with_argmax_draft() for name, pair in pairs.items()}
    typical = float(length)
    if eos is not None:
        pilot = next(iter(pairs.values()))
        typical = float(decode(pilot, rng, sequences=500, length=length, eos=eos).lengths.mean())
    each = max(1, round(budget / (typical * len(pairs))))
    decoded = {
        name: decode(pair, rng, sequences=number * each, length=length, k=k, rule=rule, fault=fault, eos=eos)
        for name, pair in pairs.items()
    }
    regimes = dict.fromkeys(pairs, True)
    for audit in range(number):
        process = EProcess(regimes, alpha=alpha)
        # The regimes take turns: which comes next depends on nothing that was drawn.
        end = (audit + 1) * each
        for first in range(audit * each, end, turn):
            for name, pair in pairs.items():
                numbers, offsets, context, tokens = decoded[name].flat(first, min(first + turn, end))
                scores = pair.scores.take(context * pair.vocab + tokens)
                planned = None
                if plan:
                    p, q = torch.from_numpy(pair.p[context]), torch.from_numpy(pair.q[context])
                    planned = process.alternatives(name).plan(p, q)
                process.update(name, scores, numbers, offsets, planned)
            if process.is_rejected:
                break
        yield process


class _Decoder:
    def __init__(self, pair: ToyPair, rng: np.random.Generator, k: int, rule: Rule, fault: Fault) -> None:
        self.pair, self.rng, self.k, self.rule, self.fault = pair, rng, k, rule, fault
        # What the decoder believes of the target; a fault may have spoilt it.
        self.p = pair.p if fault.used is None else fault.used(pair.p)
        self.q = pair.q
        self.target = _InverseCdf(self.p)
        self.drafts = _InverseCdf(pair.q if fault.drawn is None else fault.drawn(pair.q))
        self.residuals = _InverseCdf(_normalised(np.maximum(self.p - self.q, 0), self.p))
        logs = np.log(np.where(self.p > 0, self.p, 1.0))
        self.entropy = -(self.p * logs).sum(1)

    def run(self, sequences: int, length: int, eos: int | None, prompts: IntArray | None) -> Decoded:
        self.out = np.zeros((sequences, 2 + length + self.k + 2), dtype=np.int64)
        if prompts is None:
            prompts = self.rng.integers(self.pair.vocab, size=(sequences, 2))
        self.out[:, :2] = prompts
        first = self.pair.context(self.out[:, 0], self.out[:, 1])
        self.out[:, 2] = self.target.sample(first, self.rng.random(sequences))
        self.count = np.ones(sequences, dtype=np.int64)
        self.ghost = np.full(sequences, -1)
        self.ema = np.full(sequences, float(self.k))
        rounds = []
        while len(active := np.flatnonzero(self.count < length)):
            rounds.append(self._round(active))
        joined = (np.concatenate([getattr(r, name) for r in rounds]) for name in Rounds.__slots__)
        tokens = self.out[:, 2 : 2 + length]
        context = self.pair.context(self.out[:, :length], self.out[:, 1 : 1 + length])
        lengths = np.full(sequences, length)
        if eos is not None:
            ends = tokens == eos
            lengths = np.where(ends.any(1), ends.argmax(1) + 1, length)
        return Decoded(tokens, context, lengths, Rounds(*joined))

    def _round(self, active: IntArray) -> Rounds:
        drafted, context, numbers = self._draft(active)
        judged = context.copy()
        if self.fault.leak:
            ghost = self.ghost[active]
            seen = self.pair.context(ghost, self.out[active, self.count[active] + 1])
            judged[:, 0] = np.where(ghost >= 0, seen, judged[:, 0])
        p = self.p[judged[:, :-1], drafted]
        q = self.q[context[:, :-1], drafted]
        offered = self._offered(active, q)
        verify = {"exact": self._exact, "block": self._block, "tree": self._tree}.get(self.rule, self._chain)
        record, emitted = verify(drafted, judged, p, q, offered, numbers)
        accepted = record.accepted

        self.ghost[active] = -1
        if self.fault.leak:
            stopped = (accepted < offered) & (self.rng.random(len(active)) < self.fault.leak)
            rejected = _at(drafted, np.minimum(accepted, self.k - 1))
            self.ghost[active] = np.where(stopped, rejected, -1)
        if self.fault.corrupted:
            emitted = np.where(self.rng.random(emitted.shape) < self.fault.corrupted, 0, emitted)
        start = self.count[active]
        for place in range(emitted.shape[1]):
            rows = active[place <= accepted]
            self.out[rows, 2 + self.count[rows] + place] = emitted[place <= accepted, place]
        self.count[active] += accepted + 1
        self.ema[active] += EMA_WEIGHT * (accepted + 1 - self.ema[active])
        return replace(record, sequence=active, start=start)

    def _draft(self, active: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        """Return k drafts, the k + 1 contexts around them, and the numbers that drew the drafts."""
        numbers = self.rng.random((len(active), self.k))
        drafted = np.empty((len(active), self.k), dtype=np.int64)
        context = np.empty((len(active), self.k + 1), dtype=np.int64)
        end = self.count[active] + 2
        before, last = self.out[active, end - 2], self.out[active, end - 1]
        self.committed = last
        if self.fault.reuse == "race":
            self.race = self.rng.exponential(size=(len(active), self.k, self.pair.vocab))
        for place in range(self.k):
            context[:, place] = self.pair.context(before, last)
            if self.fault.reuse == "race":
                drafted[:, place] = (self.q[context[:, place]] / self.race[:, place]).argmax(1)
            else:
                drafted[:, place] = self.drafts.sample(context[:, place], numbers[:, place])
            before, last = last, drafted[:, place]
        context[:, self.k] = self.pair.context(before, last)
        return drafted, context, numbers

    def _offered(self, active: IntArray, q: FloatArray) -> IntArray:
        """Return how many of the drafts are offered: up to an unsure one, with it or (a fault) without."""
        if self.rule == "ema":
            return np.asarray(np.clip(np.rint(self.ema[active]), 1, self.k).astype(np.int64))
        if self.fault.drop_below:
            return _leading(q >= self.fault.drop_below)
        if self.rule == "stop":
            return np.minimum(_leading(q >= CONFIDENCE) + 1, self.k)
        return np.full(len(active), self.k)

    def _chain(
        self,
        drafted: IntArray,
        context: IntArray,
        p: FloatArray,
        q: FloatArray,
        offered: IntArray,
        numbers: FloatArray,
    ) -> tuple[Rounds, IntArray]:
        """Token-wise rejection: keep d with chance min(1, p / q), recover from norm(max(p - q, 0))."""
        fault = self.fault
        coins = self.rng.random(p.shape)
        if fault.coins is not None:
            coins = fault.coins(coins, numbers)
        at = Judged(p, q, coins, self.entropy[context[:, :-1]])
        keep = coins * q < p if fault.keep is None else fault.keep(at)
        kept = keep & (np.arange(self.k) < offered[:, None])
        accepted = _leading(kept)
        rejected = accepted < offered
        row = _at(context, accepted)
        place = np.minimum(accepted, self.k - 1)

        fresh = self.rng.random(len(row))
        reused = {"draft": numbers, "coin": coins}.get(fault.reuse or "")
        number = fresh if reused is None else _at(reused, place)
        weights = None
        if fault.recovered is not None:
            weights = fault.recovered(self.p[row], self.q[row], _at(drafted, place))
        recovered = self.residuals.sample(row, number) if weights is None else _sample(weights, number)
        if fault.reuse == "race":
            rest = np.maximum(self.p[row] - self.q[row], 0)
            recovered = (rest / self.race[np.arange(len(row)), place]).argmax(1)
        bonus = self.target.sample(row, fresh)
        if fault.bonus is not None:
            before = _at(context, np.maximum(accepted - 1, 0))
            bonus = _sample(fault.bonus(self.p[row], self.p[before], self.q[row]), fresh)
        extra = np.where(rejected, recovered, bonus)
        return self._record(drafted, context, p, q, offered, accepted, kept), _emit(drafted, accepted, extra)

    def _exact(
        self,
        drafted: IntArray,
        context: IntArray,
        p: FloatArray,
        q: FloatArray,
        offered: IntArray,
        numbers: FloatArray,
    ) -> tuple[Rounds, IntArray]:
        """Exact match: the target samples at every row, and its samples are emitted."""
        del numbers
        uniforms = self.rng.random(context.shape)
        samples = self.target.sample(context.ravel(), uniforms.ravel()).reshape(context.shape)
        kept = (samples[:, :-1] == drafted) & (np.arange(self.k) < offered[:, None])
        accepted = _leading(kept)
        record = self._record(drafted, context, p, q, offered, accepted, kept)
        return record, _emit(drafted, accepted, _at(samples, accepted))

    def _block(
        self,
        drafted: IntArray,
        context: IntArray,
        p: FloatArray,
        q: FloatArray,
        offered: IntArray,
        numbers: FloatArray,
    ) -> tuple[Rounds, IntArray]:
        """Block verification, 2403.10444 algorithm 2: the longest prefix whose own coin says yes."""
        del numbers
        share = np.ones(len(p))
        shares = np.empty((len(p), self.k + 1))
        shares[:, 0] = 1
        accepted = np.zeros(len(p), dtype=np.int64)
        coins = self.rng.random(p.shape)
        for place in range(self.k):
            share = np.minimum(share * p[:, place] / q[:, place], 1.0)
            shares[:, place + 1] = share
            chance = share
            if place < self.k - 1:
                row = context[:, place + 1]
                rest = np.maximum(share[:, None] * self.p[row] - self.q[row], 0).sum(1)
                whole = rest + 1 - share
                chance = np.divide(rest, whole, out=np.zeros_like(rest), where=whole > 0)
            accepted = np.where(coins[:, place] < chance, place + 1, accepted)
        row = _at(context, accepted)
        rest = np.maximum(_at(shares, accepted)[:, None] * self.p[row] - self.q[row], 0)
        weights = np.where((accepted == self.k)[:, None], self.p[row], rest)
        kept = np.arange(self.k) < accepted[:, None]
        record = self._record(drafted, context, p, q, offered, accepted, kept)
        record = replace(record, tested=np.ones_like(kept))
        return record, _emit(drafted, accepted, _sample(weights, self.rng.random(len(p))))

    def _tree(
        self,
        drafted: IntArray,
        context: IntArray,
        p: FloatArray,
        q: FloatArray,
        offered: IntArray,
        numbers: FloatArray,
    ) -> tuple[Rounds, IntArray]:
        """A chain whose every node has one sibling, drawn without replacement and without children.

        The sibling of the first rejected node is all that is ever looked at, so only that one is drawn.
        """
        del numbers
        coins = self.rng.random((len(p), self.k + 1))
        kept = coins[:, :-1] * q < p
        accepted = _leading(kept)
        row, place = _at(context, accepted), np.minimum(accepted, self.k - 1)
        each = np.arange(len(p))
        target = self.p[row]
        draft = self.q[row]
        first = drafted[each, place]
        rejected = accepted < offered
        target = np.where(rejected[:, None], _normalised(np.maximum(target - draft, 0), target), target)
        rest = _without(draft, first)
        mass = rest.sum(1)
        has_sibling = rejected & (mass > 1e-12)
        draft = rest / np.where(has_sibling, mass, 1.0)[:, None]
        second = _sample(np.where(has_sibling[:, None], draft, target), self.rng.random(len(p)))
        p_second, q_second = target[each, second], draft[each, second]
        took = has_sibling & (coins[:, -1] * q_second < p_second)
        lost = has_sibling & ~took
        after = _normalised(np.maximum(target - draft, 0), target)
        # The token before the second sibling is the last accepted one, or the last committed one.
        last = np.where(accepted > 0, _at(drafted, np.maximum(accepted - 1, 0)), self.committed)
        beyond = self.p[self.pair.context(last, second)]
        weights = np.where(took[:, None], beyond, np.where(lost[:, None], after, target))
        extra = _sample(weights, self.rng.random(len(p)))
        record = self._record(drafted, context, p, q, offered, accepted, kept)
        emitted = _emit(np.c_[drafted, second], accepted, np.where(took, second, extra))
        emitted[each, accepted + 1] = extra
        return replace(
            record,
            accepted=accepted + took,
            drafted=np.c_[drafted, second],
            context=np.c_[record.context, row],
            p=np.c_[p, p_second],
            q=np.c_[q, q_second],
            tested=np.c_[record.tested, has_sibling],
            kept=np.c_[kept & record.tested, took],
        ), emitted

    def _record(
        self,
        drafted: IntArray,
        context: IntArray,
        p: FloatArray,
        q: FloatArray,
        offered: IntArray,
        accepted: IntArray,
        kept: BoolArray,
    ) -> Rounds:
        places = np.arange(self.k)
        tested = (places <= accepted[:, None]) & (places < offered[:, None])
        none = np.zeros(len(p), dtype=np.int64)
        return Rounds(none, none, offered, accepted, drafted, context[:, :-1], p, q, tested, kept & tested)


class _InverseCdf:
    """Samples rows of a table of laws, one number each, by binary search."""

    def __init__(self, laws: FloatArray) -> None:
        rows, vocab = laws.shape
        self.width = 1 << (vocab - 1).bit_length()
        cdf = np.full((rows, self.width), 2.0)
        cdf[:, :vocab] = laws.cumsum(1)
        # From the last possible token on the CDF is beyond every number, whatever the rounding.
        last = vocab - 1 - (laws[:, ::-1] > 0).argmax(1)
        cdf[np.arange(self.width) >= last[:, None]] = 2.0
        self.cdf = cdf.ravel()

    def sample(self, rows: IntArray, numbers: FloatArray) -> IntArray:
        """Return, for each row, the first token at which the CDF exceeds the number."""
        start = rows * self.width
        place = start.copy()
        step = self.width // 2
        while step:
            place += step * (self.cdf[place + step - 1] <= numbers)
            step //= 2
        return np.asarray(place - start)


def _sample(weights: FloatArray, numbers: FloatArray) -> IntArray:
    """Return a token per row of unnormalised weights `[n, vocab]`, by inverse CDF."""
    cdf = weights.cumsum(1)
    tokens = (cdf <= numbers[:, None] * cdf[:, -1:]).sum(1)
    last = weights.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(1)
    return np.asarray(np.minimum(tokens, last))


def _normalised(weights: FloatArray, otherwise: FloatArray) -> FloatArray:
    """Normalise rows; one without mass (a residual that is never needed) becomes `otherwise`."""
    mass = weights.sum(1, keepdims=True)
    return np.where(mass > 0, weights / np.where(mass > 0, mass, 1.0), otherwise)


def _leading(claims: BoolArray) -> IntArray:
    """Return how many of each row are true before the first that is not."""
    return np.asarray(claims.astype(np.int64).cumprod(1).sum(1))


def _at(table: npt.NDArray[_T], places: IntArray) -> npt.NDArray[_T]:
    """Return one entry per row."""
    return np.asarray(table[np.arange(len(table)), places])


def _emit(drafted: IntArray, accepted: IntArray, extra: IntArray) -> IntArray:
    """Return drafts with the extra token after the accepted ones, `[n, k + 1]`."""
    emitted = np.column_stack([drafted, extra])
    emitted[np.arange(len(drafted)), accepted] = extra
    return emitted
