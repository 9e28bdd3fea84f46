"""The primary test's errors on toy models: false alarms of lossless rules, and faults that are missed.

When is finding a fault promised? The audit prints, for each direction, the smallest effect it would have
found with probability .99. A fault whose distance is at least twice that must be found in 99 of 100 audits:
twice, because a fault is only like its direction, never equal to it. Distances and effects must be of the
same tokens, and of the same stream of evidence:

- one regime: the fault's TV per token under that draft, against the smallest effect found by that regime's
  own stream, a third of the tokens, in the direction that gathers most evidence there;
- all together: the mean TV over all tokens of an audit, against the smallest effect of the stream that runs
  on through all regimes, in the direction that gathers most evidence in it. This is the number an audit
  prints, about faults that are present in every regime alike.

The promise applies if either pair says so: the mixture alarms on any of its streams. It does not carry
over from one to another. A fault that shows in one regime has a third of its TV in the mean, and the pooled
figure is the smaller by about the root of 3 only; to hold one regime's TV against the pooled effect would
promise what no test can keep. Distances are those of the fault on contexts it visits itself, effects those
of a lossless decoder on its own, of the audit's budget, level and alternatives.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from specbench.audit import regimes, toy
from specbench.audit.alternatives import Alternatives, FloatArray
from specbench.audit.e_process import EProcess

BATCH = 20
TURN = 16
"""Sequences of one regime before the next: as an audit draws in batches, and ten times faster than one."""
EOS = 1
RULE_AUDITS, FAULT_AUDITS = 4000, 100
"""What the committed figures are made of; with fewer nothing is said to hold."""
FAULT_AUDITS_IN_DOUBT = 400
DOUBTFUL_SHARE, PROMISED_SHARE = 0.97, 0.99
FACTOR = 2.0
"""A fault of this many smallest detectable effects is promised to be found."""
FAMOUS = 20.0
"""An e-value at which evidence is commonly called strong; Ville's bound for reaching it is .05."""
RUN_LEVEL = 1e-3
"""The level of a whole run. An audit stops at its own, stricter bar, so its supremum says this too."""
CHANCE = 0.01
"""How often figures that are as they should be may look broken, over the rules together."""
LOOK_TOKENS = 400_000
NO_GROWTH = 1e-7
"""Nats per token that are rounding: an alarm would take more than a hundred million tokens."""
ALL = "all"

Audit = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """What an audit is: the first line of the log. Anything else here would change what was drawn."""

    budget: int
    alpha: float
    vocab: int
    seed: int
    turn: int = TURN

    def plain(self) -> dict[str, Any]:
        """Return it in JSON types."""
        return asdict(self)

    def pairs(self) -> dict[str, toy.ToyPair]:
        """Return the target with each regime's draft."""
        return {
            name: toy.ToyPair.make(self.vocab, acceptance=acceptance)
            for name, acceptance in regimes.ACCEPTANCE.items()
        }


def audit_batch(
    pairs: Mapping[str, toy.ToyPair], setup: Setup, case: str, batch: int
) -> list[dict[str, Any]]:
    """Run one batch of audits; its random numbers depend on the seed, the case and the batch alone."""
    kind, name = case.split(":")
    rules: dict[str, toy.Rule] = {rule: rule for rule in toy.RULES}
    rng = np.random.default_rng([setup.seed, zlib.crc32(case.encode()), batch])
    results = []
    for process in toy.audits(
        pairs,
        rng,
        number=BATCH,
        budget=setup.budget,
        alpha=setup.alpha,
        rule=rules[name] if kind == "rule" else "rejection",
        fault=toy.FAULTS[name] if kind == "fault" else toy.NO_FAULT,
        eos=EOS,
        turn=setup.turn,
    ):
        result = process.result()
        results.append(
            {
                "tokens": result.tokens,
                "tokens_at_alarm": result.tokens_at_alarm,
                "log_supremum": round(result.log_supremum, 6),
                "log_e_value": round(result.log_e_value, 6),
                "best": result.best_alternative,
                "regime": result.best_regime,
            }
        )
    return results


# Lossless rules


def summary_of_rule(audits: Sequence[Audit], alpha: float, *, looks: int = 1) -> dict[str, Any]:
    """Summarise audits in which every alarm is false.

    Args:
        audits: Of lossless decoders.
        alpha: The level they were stopped at.
        looks: How many such summaries are judged side by side; each has that share of the chance of looking
            broken though all is well.

    Alarms are at most the 1 - `CHANCE` / `looks` quantile of the Poisson law of as many as the level allows,
    for each level; the share that ever reached 20 is at most .05, and the mean e-value, which is 1 in the
    long run since no audit stops but at its alarm or its end, at most 1 within its error.
    """
    num = len(audits)
    suprema = np.array([audit["log_supremum"] for audit in audits])
    e_values = np.exp([audit["log_e_value"] for audit in audits])
    quantile = 1 - CHANCE / looks
    # At its own level an audit knows whether it alarmed; rounding the supremum must not decide.
    stopped = sum(audit["tokens_at_alarm"] is not None for audit in audits)
    levels = []
    for level in sorted({alpha, max(alpha, RUN_LEVEL)}):
        alarms = stopped if level == alpha else int((suprema >= -math.log(level)).sum())
        bound = int(stats.poisson.ppf(quantile, num * level))
        levels.append(
            {
                "level": level,
                "alarms": alarms,
                "expected_at_most": num * level,
                "bound": bound,
                "holds": alarms <= bound,
            }
        )
    share = float((suprema >= math.log(FAMOUS)).mean())
    mean = float(e_values.mean())
    error = float(e_values.std(ddof=1) / math.sqrt(num)) if num > 1 else math.inf
    mean_holds = mean <= 1 + float(stats.norm.ppf(quantile)) * error
    return {
        "audits": num,
        "tokens": sum(audit["tokens"] for audit in audits),
        "levels": levels,
        "share_reaching_20": share,
        "share_reaching_20_holds": share <= 1 / FAMOUS,
        "mean_e_value": mean,
        "mean_e_value_error": error,
        "mean_e_value_holds": mean_holds,
        "holds": all(level["holds"] for level in levels) and share <= 1 / FAMOUS and mean_holds,
    }


def summary_of_rules(done: Mapping[str, Sequence[Audit]], alpha: float) -> dict[str, Any]:
    """Summarise every lossless rule, and all of them together."""
    audits = {name: done[f"rule:{name}"] for name in toy.RULES if done.get(f"rule:{name}")}
    if not audits:
        return {"rules": {}, "holds": None}
    rules = {name: summary_of_rule(those, alpha, looks=len(audits)) for name, those in audits.items()}
    every = summary_of_rule([audit for those in audits.values() for audit in those], alpha)
    holds = every["holds"] and all(rule["holds"] for rule in rules.values())
    enough = len(audits) == len(toy.RULES) and min(map(len, audits.values())) >= RULE_AUDITS
    return {"rules": rules, ALL: every, "holds": enough or None if holds else False}


# Faults


@dataclass(frozen=True, slots=True)
class Sight:
    """A fault in one regime, or in all together, beside what could be found there.

    `tv` is the mean distance per token, estimated from below. `direction` is that of the alternative with
    the most evidence, `growth` what that gains per token of the whole audit, in nats; None and 0 where no
    alternative gains. `smallest` is the smallest detectable effect of the direction, None where no strength
    of it would be found.
    """

    tv: float
    alternative: str | None
    direction: str | None
    growth: float
    smallest: float | None

    @property
    def ratio(self) -> float | None:
        """The distance in smallest detectable effects."""
        return None if self.smallest is None else self.tv / self.smallest

    @property
    def is_promised(self) -> bool:
        """Whether a fault like this must be found."""
        return self.ratio is not None and self.ratio >= FACTOR

    def plain(self) -> dict[str, Any]:
        """Return it in JSON types."""
        return {**asdict(self), "ratio": self.ratio}


def instrument(pairs: Mapping[str, toy.ToyPair], setup: Setup) -> EProcess:
    """Audit a lossless decoder once, and work out on its contexts what would have been found."""
    rng = np.random.default_rng([setup.seed, 2])
    (process,) = toy.audits(
        pairs,
        rng,
        number=1,
        budget=setup.budget,
        alpha=setup.alpha,
        eos=EOS,
        turn=setup.budget,
        plan=True,
    )
    return process


def sights(
    pairs: Mapping[str, toy.ToyPair], fault: toy.Fault, planned: EProcess, seed: int
) -> dict[str, Sight]:
    """Look at a fault in each regime and in all together, on tokens drawn for this."""
    directions = [direction.name for direction in Alternatives(has_draft=True).directions]
    seen: dict[str, Sight] = {}
    growths = []
    for regime, pair in pairs.items():
        halves = _counts(pair, fault, seed)
        weights = (halves[0] + halves[1]).ravel() / (halves[0].sum() + halves[1].sum())
        growths.append(weights @ pair.scores.log_factors)
        sight = _sight(_distance(pair, halves), growths[-1], len(pairs), planned, regime)
        if sight.direction is not None:
            # What shows in one direction is a lower bound too, and a sharper one where the fault is small.
            effect = float(weights @ pair.scores.witness[:, directions.index(sight.direction)])
            sight = replace(sight, tv=max(sight.tv, effect))
        seen[regime] = sight
    mean = float(np.mean([sight.tv for sight in seen.values()]))
    seen[ALL] = _sight(mean, np.mean(growths, axis=0), 1, planned, None)
    return seen


def _sight(tv: float, growth: FloatArray, shares: int, planned: EProcess, regime: str | None) -> Sight:
    """Name the best alternative; a regime has one of `shares` parts of the audit's tokens."""
    usable = Alternatives(has_draft=True)
    best = int(growth.argmax())
    if growth[best] <= NO_GROWTH:
        return Sight(tv, None, None, 0.0, None)
    direction = usable.directions[usable.direction_of[best]].name
    detectable = planned.smallest_detectable_effect(direction, regime)
    smallest = None if detectable is None else detectable.smallest
    return Sight(tv, usable.names[best], direction, float(growth[best]) / shares, smallest)


def _counts(pair: toy.ToyPair, fault: toy.Fault, seed: int) -> tuple[FloatArray, FloatArray]:
    """Decode, and count emitted tokens by context `[contexts, vocab]`, in two halves of the sequences."""
    rng = np.random.default_rng([seed, 1])
    decoded = toy.decode(pair, rng, sequences=LOOK_TOKENS // 50, length=100, fault=fault, eos=EOS)
    halves = []
    middle, end = len(decoded.lengths) // 2, len(decoded.lengths)
    for first, last in ((0, middle), (middle, end)):
        _, _, context, tokens = decoded.flat(first, last)
        places = context * pair.vocab + tokens
        halves.append(np.bincount(places, minlength=pair.p.size).reshape(pair.p.shape).astype(np.float64))
    return halves[0], halves[1]


def _distance(pair: toy.ToyPair, halves: tuple[FloatArray, FloatArray]) -> float:
    """Estimate the mean TV per token from below: sets chosen on one half, measured on the other, and back.

    Well below where a fault moves much mass to one token and a little from all others, which noise hides.
    """
    excess = [counts - counts.sum(1, keepdims=True) * pair.p for counts in halves]
    found = excess[1][excess[0] > 0].sum() + excess[0][excess[1] > 0].sum()
    return float(found / (halves[0].sum() + halves[1].sum()))


def kept_promise(caught: int, audits: int) -> bool | None:
    """Say whether a promised fault was found often enough; None while that cannot be said.

    99 of 100 are enough. 97 or 98 may be bad luck and are settled by 400; fewer are too few.
    """
    if audits < FAULT_AUDITS:
        return None
    if caught >= PROMISED_SHARE * audits:
        return True
    in_doubt = audits < FAULT_AUDITS_IN_DOUBT and caught >= DOUBTFUL_SHARE * audits
    return None if in_doubt else False


def audits_needed(audits: Sequence[Audit], is_promised: bool, wanted: int) -> int:
    """Return how many audits a fault should have, once it has as many as were wanted."""
    num = len(audits)
    caught = sum(audit["tokens_at_alarm"] is not None for audit in audits)
    in_doubt = is_promised and num >= FAULT_AUDITS and kept_promise(caught, num) is None
    return max(wanted, FAULT_AUDITS_IN_DOUBT) if in_doubt else wanted


def summary_of_fault(
    audits: Sequence[Audit], fault: toy.Fault, seen: Mapping[str, Sight], log_bar: float
) -> dict[str, Any]:
    """Summarise audits in which every alarm is right.

    Args:
        audits: Of the fault.
        fault: Its class and the regime it shows in best are taken over.
        seen: From `sights`.
        log_bar: What the log evidence of one alternative must reach for an alarm, for the estimate of the
            tokens needed where fewer than half of the audits found the fault.
    """
    num = len(audits)
    found = [audit for audit in audits if audit["tokens_at_alarm"] is not None]
    times = sorted(audit["tokens_at_alarm"] or math.inf for audit in audits)
    median = statistics.median_low(times)
    best = Counter(audit["best"] for audit in found).most_common(1)
    fastest = max(sight.growth for sight in seen.values())
    estimate = round(log_bar / fastest) if fastest > 0 else None
    closest = max(seen, key=lambda name: seen[name].ratio or 0.0)
    is_promised = any(sight.is_promised for sight in seen.values())
    return {
        "kind": fault.kind,
        "shows_best_under": fault.regime,
        "sights": {name: sight.plain() for name, sight in seen.items()},
        "closest": closest,
        "promised": is_promised,
        "audits": num,
        "caught": len(found),
        "promise_kept": kept_promise(len(found), num) if is_promised else None,
        "median_tokens": None if math.isinf(median) else median,
        "estimated_tokens": estimate if math.isinf(median) else None,
        "best_alternative": best[0][0] if best else None,
        "share_of_best": best[0][1] / len(found) if best else None,
    }


def log_bar(planned: EProcess) -> float:
    """Return what one alternative's log evidence must reach by itself, averaged over streams as it is."""
    regimes_ = planned.result().regimes
    streams = len(regimes_) + (len(regimes_) > 1)
    return math.log(len(Alternatives(has_draft=True).names) * streams / planned.alpha)


def summary_of_faults(
    done: Mapping[str, Sequence[Audit]], looks: Mapping[str, Mapping[str, Sight]], bar: float
) -> dict[str, Any]:
    """Summarise every fault that was looked at; what must be found, and was it?"""
    faults = {
        name: summary_of_fault(done[f"fault:{name}"], toy.FAULTS[name], seen, bar)
        for name, seen in looks.items()
        if done.get(f"fault:{name}")
    }
    kept = [row["promise_kept"] for row in faults.values() if row["promised"]]
    enough = len(faults) == len(toy.FAULTS) and all(row["audits"] >= FAULT_AUDITS for row in faults.values())
    holds: bool | None = (enough and None not in kept) or None
    return {"faults": faults, "holds": False if False in kept else holds}
