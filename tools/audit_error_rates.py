"""Measure the primary test's error rates on toy models, under every lossless rule and every fault.

Each audit draws fresh sequences in the three draft regimes and runs the e-process to its alarm or to the
end of its budget. Reported are alarms under lossless rules (there should be about as many as alpha says, or
fewer), how often the evidence ever reached 20 (at most one time in 20) and the mean e-value at the end (at
most 1); and for each fault how often and how soon it is found, and what it looks like. Stop it at any time:
it goes on where it was, and more --audits add to those done.

    python tools/audit_error_rates.py --minutes 3
    python tools/audit_error_rates.py --rules rejection --faults none --audits 5000
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from specbench.audit import regimes, toy

BATCH = 20
TURN = 16
"""Sequences of one regime before the next: as an audit draws in batches, and ten times faster than one."""
FAMOUS = 20.0
"""An e-value at which evidence is commonly called strong; Ville's bound for reaching it is .05."""
DISTANCE_TOKENS = 400_000


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--audits", type=int, default=200, help="audits of each lossless rule")
    parser.add_argument("--fault-audits", type=int, default=40, help="audits of each fault")
    parser.add_argument("--budget", type=int, default=60_000, help="tokens of one audit, over its regimes")
    parser.add_argument("--alpha", type=float, default=0.6e-3 / 4, help="level of one audit")
    parser.add_argument("--rules", default="all", help="comma-separated, all, or none")
    parser.add_argument("--faults", default="all", help="comma-separated, all, or none")
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=None, help="stop after so many")
    parser.add_argument("--out", type=Path, default=Path("results/audit"))
    return parser.parse_args()


def chosen(text: str, known: Iterable[str]) -> list[str]:
    """Return the names that a list on the command line means."""
    if text in ("all", "none"):
        return list(known) if text == "all" else []
    names = text.split(",")
    if unknown := set(names) - set(known):
        sys.exit(f"error: unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(known)}")
    return names


def audit_batch(
    pairs: Mapping[str, toy.ToyPair], options: argparse.Namespace, case: str, batch: int
) -> list[dict[str, Any]]:
    """Run one batch of audits; its random numbers depend on the seed, the case and the batch alone."""
    kind, name = case.split(":")
    rules: dict[str, toy.Rule] = {rule: rule for rule in toy.RULES}
    rng = np.random.default_rng([options.seed, zlib.crc32(case.encode()), batch])
    results = []
    for process in toy.audits(
        pairs,
        rng,
        number=BATCH,
        budget=options.budget,
        alpha=options.alpha,
        rule=rules[name] if kind == "rule" else "rejection",
        fault=toy.FAULTS[name] if kind == "fault" else toy.NO_FAULT,
        eos=1,
        turn=TURN,
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


def distance(pair: toy.ToyPair, fault: toy.Fault, seed: int) -> float:
    """Estimate the mean TV per token from below: sets chosen on half of the draws, measured on the others."""
    rng = np.random.default_rng([seed, 1])
    decoded = toy.decode(pair, rng, sequences=DISTANCE_TOKENS // 100, length=100, fault=fault)
    halves = []
    for half in (slice(0, None, 2), slice(1, None, 2)):
        counts = np.zeros_like(pair.p)
        np.add.at(counts, (decoded.context[half].ravel(), decoded.tokens[half].ravel()), 1.0)
        halves.append(counts)
    excess = [counts - counts.sum(1, keepdims=True) * pair.p for counts in halves]
    return float(excess[1][excess[0] > 0].sum() / halves[1].sum())


def summary_of_rule(audits: list[dict[str, Any]], alpha: float) -> dict[str, Any]:
    """Summarise audits in which every alarm is false."""
    num = len(audits)
    alarms = sum(audit["tokens_at_alarm"] is not None for audit in audits)
    famous = sum(audit["log_supremum"] >= math.log(FAMOUS) for audit in audits)
    return {
        "audits": num,
        "tokens": sum(audit["tokens"] for audit in audits),
        "alarms": alarms,
        "alpha": alpha,
        "alarm_rate_upper_95": float(stats.beta.ppf(0.95, alarms + 1, num - alarms)) if alarms < num else 1.0,
        "share_reaching_20": famous / num,
        "mean_final_e_value": math.fsum(math.exp(audit["log_e_value"]) for audit in audits) / num,
    }


def summary_of_fault(audits: list[dict[str, Any]], fault: toy.Fault, tv: float) -> dict[str, Any]:
    """Summarise audits in which every alarm is right."""
    num = len(audits)
    found = [audit for audit in audits if audit["tokens_at_alarm"] is not None]
    times = sorted(audit["tokens_at_alarm"] or math.inf for audit in audits)
    median = statistics.median_low(times)
    best = Counter(audit["best"] for audit in found).most_common(1)
    return {
        "kind": fault.kind,
        "regime": fault.regime,
        "tv_in_regime": tv,
        "audits": num,
        "found": len(found) / num,
        "median_tokens": None if math.isinf(median) else median,
        "best_alternative": best[0][0] if best else None,
        "share_of_best": best[0][1] / len(found) if best else None,
    }


def markdown(document: Mapping[str, Any]) -> str:
    """Return the tables."""
    setup = document["setup"]
    lines = [
        "# Error rates of the e-process",
        "",
        f"Toy models of {setup['vocab']} tokens, {setup['budget']:,} tokens per audit over the regimes"
        f" {', '.join(regimes.ACCEPTANCE)}, alpha {setup['alpha']:g}, seed {setup['seed']}."
        " Made by `tools/audit_error_rates.py`.",
        "",
        "| lossless rule | audits | tokens | alarms | rate, 95 % upper | reached 20 | mean e at the end |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in document["rules"].items():
        lines.append(
            f"| {name} | {row['audits']} | {row['tokens']:,} | {row['alarms']} |"
            f" {row['alarm_rate_upper_95']:.2g} | {row['share_reaching_20']:.4f} |"
            f" {row['mean_final_e_value']:.3f} |"
        )
    lines += [
        "",
        "| fault | class | shows under | TV there | found | median tokens | best alternative | its share |",
        "|---|---|---|--:|--:|--:|---|--:|",
    ]
    for name, row in document["faults"].items():
        median = "–" if row["median_tokens"] is None else f"{row['median_tokens']:,}"
        share = "–" if row["share_of_best"] is None else f"{row['share_of_best']:.2f}"
        lines.append(
            f"| {name} | {row['kind']} | {row['regime']} | {row['tv_in_regime']:.3f} | {row['found']:.2f} |"
            f" {median} | {row['best_alternative'] or '–'} | {share} |"
        )
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Replace a file in one piece."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def load(path: Path, setup: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the audits done so far; a file is begun where there is none."""
    audits: dict[str, list[dict[str, Any]]] = {}
    if not path.exists():
        write(path, json.dumps(setup) + "\n")
        return audits
    head, *batches = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if json.loads(head) != setup:
        sys.exit(
            f"error: {path} was made with {head.strip()}; expected {json.dumps(setup)}; give another --out"
        )
    whole = [line for line in batches if line.endswith("\n")]
    write(path, head + "".join(whole))  # the last line is torn if the run was killed while writing it
    for line in whole:
        entry = json.loads(line)
        audits.setdefault(entry["case"], []).extend(entry["audits"])
    return audits


def summary(
    setup: Mapping[str, Any], audits: Mapping[str, list[dict[str, Any]]], pairs: Mapping[str, toy.ToyPair]
) -> dict[str, Any]:
    """Summarise what was done."""
    document: dict[str, Any] = {"setup": setup, "rules": {}, "faults": {}}
    for name in toy.RULES:
        if done := audits.get(f"rule:{name}"):
            document["rules"][name] = summary_of_rule(done, setup["alpha"])
    for fault_name, fault in toy.FAULTS.items():
        if done := audits.get(f"fault:{fault_name}"):
            tv = distance(pairs[fault.regime], fault, setup["seed"])
            document["faults"][fault_name] = summary_of_fault(done, fault, tv)
    return document


def main() -> None:
    """Run what is still to be done and write the tables."""
    options = arguments()
    wanted = {f"rule:{name}": options.audits for name in chosen(options.rules, toy.RULES)}
    wanted |= {f"fault:{name}": options.fault_audits for name in chosen(options.faults, toy.FAULTS)}
    setup = {name: getattr(options, name) for name in ("budget", "alpha", "vocab", "seed")}
    setup["turn"] = TURN
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "error_rates.audits.jsonl"
    audits = load(log, setup)
    pairs = {
        name: toy.ToyPair.make(options.vocab, acceptance=acceptance)
        for name, acceptance in regimes.ACCEPTANCE.items()
    }
    stop = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    while time.monotonic() < stop:
        # The case that is furthest behind, so that an early stop leaves all with something.
        shares = {case: len(audits.get(case, [])) / number for case, number in wanted.items() if number}
        case = min(shares, key=lambda name: shares[name], default=None)
        if case is None or shares[case] >= 1:
            break
        done = audits.setdefault(case, [])
        batch = audit_batch(pairs, options, case, len(done) // BATCH)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": case, "audits": batch}) + "\n")
        done += batch
        print(f"{case}: {len(done)} of {wanted[case]}", file=sys.stderr)
    document = summary(setup, audits, pairs)
    write(options.out / "error_rates.json", json.dumps(document, indent=1) + "\n")
    write(options.out / "error_rates.md", markdown(document))
    print(markdown(document))


if __name__ == "__main__":
    main()
