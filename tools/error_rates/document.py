"""The measured error rates as one page of markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specbench.audit import regimes

ABSENT = "–"
HEADLINES = {
    "rules": "Lossless rules raise no more alarms than they may",
    "faults": "Faults that must be found are",
    "p_values": "P-values are at most as often small as they say",
    "runtime": "Innocent strategies pass through the runtime without an alarm",
    "normalisers": "Every alternative is a law at every token",
}


def markdown(document: Mapping[str, Any]) -> str:
    """Return the page. A section that was not measured is said to be missing."""
    lines = ["# Error rates of the audit", "", "Made by `tools/audit_error_rates.py`.", ""]
    lines += table(
        ["claim", "holds"],
        [[words, claim(document.get(name, {}).get("holds"))] for name, words in HEADLINES.items()],
        numbers=0,
    )
    render = {
        "rules": _rules,
        "faults": _faults,
        "p_values": _p_values,
        "runtime": _runtime,
        "normalisers": _normalisers,
    }
    for name, section in render.items():
        if name in document:
            lines += ["", *section(document[name], document)]
    return "\n".join(lines) + "\n"


def claim(holds: bool | None) -> str:
    """Say whether something holds; what was not measured in full does not."""
    return "not yet measured in full" if holds is None else "yes" if holds else "NO"


def number(value: float | None, form: str) -> str:
    """Format a number; a dash where there is none."""
    return ABSENT if value is None else f"{value:{form}}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int) -> list[str]:
    """Return a table whose last `numbers` columns are aligned to the right."""
    words = len(head) - numbers
    rule = ["---"] * words + ["--:"] * numbers
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *rows)]


def _rules(section: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    setup = document["setup"]
    lines = [
        "## Lossless rules",
        "",
        f"Toy models of {setup['vocab']} tokens, {setup['budget']:,} tokens per audit over the regimes"
        f" {', '.join(regimes.ACCEPTANCE)}, stopped at alpha {setup['alpha']:g}, seed {setup['seed']}. Alarms"
        " are given as found / expected at most / bound: the .99 Poisson quantile of what the level allows,"
        " shared out over the rules in their lines. An e-value of 20 may be reached by .05 of the audits. The"
        " mean e-value at the end (± standard error) is 1 in the long run, most of it in the rare audits that"
        " alarm; it may exceed 1 by chance only.",
        "",
    ]
    if not section["rules"]:
        return [*lines, "Nothing measured."]
    rows = [*section["rules"].items(), ("**all of it**", section["all"])]
    levels = [level["level"] for level in section["all"]["levels"]]
    head = ["rule", "audits", "tokens", *(f"alarms at {level:g}" for level in levels)]
    body = []
    for name, row in rows:
        alarms = [
            f"{level['alarms']} / {level['expected_at_most']:.3g} / {level['bound']}"
            for level in row["levels"]
        ]
        mean = f"{row['mean_e_value']:.3f} ± {row['mean_e_value_error']:.3f}"
        counts = str(row["audits"]), f"{row['tokens']:,}", *alarms
        body.append([name, *counts, f"{row['share_reaching_20']:.4f}", mean, claim(row["holds"])])
    head += ["reached 20", "mean e at the end", "holds"]
    return lines + table(head, body, numbers=len(head) - 1)


def _faults(section: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Faults",
        "",
        "Planted in token-wise rejection, one at a time, audited as above. TV is the fault's mean distance"
        " per token in each regime and over all, estimated from below, to about .001; *against* is where it"
        " is the largest multiple of the smallest detectable effect (SDE) of its best-fitting direction. From"
        " twice the SDE on it must be found in 99 of 100 audits (97 or 98 are settled by 400); the others are"
        " listed with what was measured. Tokens are the median at the alarm, over all regimes, which take"
        f" turns of {document['setup']['turn']} sequences from {next(iter(regimes.ACCEPTANCE))} on: a fault"
        " that does not show there cannot be found in the first turn. *Estimate*: fewer than half of the"
        " audits found it.",
        "",
    ]
    if not section["faults"]:
        return [*lines, "Nothing measured."]
    head = ["fault", "class", "against", "direction", "most like", *(f"TV {r}" for r in regimes.ACCEPTANCE)]
    head += ["TV all", "SDE", "TV / SDE", "must be found", "caught", "tokens"]
    body = []
    for name, row in section["faults"].items():
        seen = row["sights"]
        closest = seen[row["closest"]]
        promised = ("yes" if row["promise_kept"] is not False else "yes, BROKEN") if row["promised"] else "no"
        names = name, row["kind"], row["closest"], closest["direction"], row["best_alternative"]
        distances = [f"{seen[regime]['tv']:.4f}" for regime in (*regimes.ACCEPTANCE, "all")]
        caught = f"{row['caught']}/{row['audits']}"
        smallest, ratio = number(closest["smallest"], ".4f"), number(closest["ratio"], ".1f")
        words = [str(name or ABSENT) for name in names]
        body.append([*words, *distances, smallest, ratio, promised, caught, _tokens(row)])
    return lines + table(head, body, numbers=len(head) - 5)


def _tokens(row: Mapping[str, Any]) -> str:
    """Say how many tokens a fault needs: measured, or estimated where it was mostly missed."""
    if row["median_tokens"] is None and row["estimated_tokens"] is not None:
        return f"{row['estimated_tokens']:,} (estimate)"
    return number(row["median_tokens"], ",")


def _p_values(section: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    del document
    lines = [
        "## P-values under the null",
        "",
        "Shares at or below each level. The upper bound is binomial, .99 over the whole table, and tested."
        " The lower is what a uniform p-value would show, and is printed only: a p-value that counts the"
        " observed statistic among the simulated ones, or is made of few counts, may be small less often.",
        "",
    ]
    body = []
    for kind, row in section["kinds"].items():
        for at in row["levels"]:
            shares = [f"{at[name]:.4f}" for name in ("share", "least_if_uniform", "most")]
            body.append([kind, f"{row['p_values']:,}", f"{at['level']:g}", *shares, claim(at["holds"])])
    head = ["test", "p-values", "level", "share", "lower", "upper", "holds"]
    return lines + table(head, body, numbers=6)


def _runtime(section: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    setup = document["runtime_setup"]
    lines = [
        "## Through the runtime",
        "",
        f"The innocent strategies of the self-test on its toy model, the budget {setup['budget']}"
        f" ({setup['tokens']:,} tokens) with continuations and contracts, another seed each:"
        f" {section['audits']} audits, {section['alarms']} with an alarm, {section['expected_at_most']:.3g}"
        " expected at most.",
        "",
    ]
    body = [
        [name, str(row["audits"]), f"{row['tokens']:,}", str(row["alarms"])]
        for name, row in section["variants"].items()
    ]
    lines += table(["strategy", "audits", "tokens", "alarms"], body, numbers=3)
    parts = [[name, str(row["audits"]), str(row["alarms"])] for name, row in section["components"].items()]
    return [*lines, "", *table(["test", "audits it judged", "alarms"], parts, numbers=2)]


def _normalisers(section: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    del document
    lines = [
        "## Normalisers",
        "",
        "At every token of one audit in float32, every alternative's law (mixed with p as in the audit):"
        f" its least probability, and how far its sum is from 1, of which {section['tolerance']:g} is"
        " allowed; and how far the factor that the audit used for the emitted token is from that law over p,"
        " relative to it.",
        "",
    ]
    body = []
    for name, row in section["models"].items():
        counts = [f"{row[count]:,}" for count in ("vocab", "tokens", "alternatives", "laws")]
        errors = [f"{row[error]:.2g}" for error in ("smallest", "sum_error", "factor_error")]
        body.append([name, *counts, *errors, claim(row["holds"])])
    head = ["model", "vocabulary", "tokens", "alternatives", "laws", "least", "sum off by", "factor off by"]
    return lines + table([*head, "holds"], body, numbers=8)
