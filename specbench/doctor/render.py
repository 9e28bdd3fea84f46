"""How a diagnosis is told: lines that read without colour, a table and a sentence; or one JSON document."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict

from specbench.doctor.bounds import Bounds, Row, StepBound
from specbench.doctor.examination import Diagnosis
from specbench.doctor.measure import SLOW_FEW_TOKENS, TOKENS

SCHEMA_VERSION = 1
_WIDTH = 110


def text(found: Diagnosis) -> str:
    """Write a line per finding, then what the bounds allow, then one line that counts what is wrong."""
    width = max((len(finding.check) for finding in found.findings), default=0)
    lines = []
    for finding in found.findings:
        lines.append(f"{finding.status:<7}  {finding.check:<{width}}  {finding.message}")
        if finding.remedy:
            lines.append(f"{'':<7}  {'':<{width}}  to do: {finding.remedy}")
    if found.bounds is not None:
        busy = found.busy is not None and found.busy.busy
        few = None
        if found.measured is not None and found.target is not None:
            few = found.measured.few_tokens.get(found.target.dtype)
        lines += ["", *_bounds(found.bounds, busy, few)]
    return "\n".join([*lines, "", _count(found)]) + "\n"


def document(found: Diagnosis) -> str:
    """Write everything as one JSON document."""
    content = {"schema_version": SCHEMA_VERSION, "outcome": found.outcome, **asdict(found)}
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _count(found: Diagnosis) -> str:
    problems = sum(finding.status == "problem" for finding in found.findings)
    warnings = sum(finding.status == "warning" for finding in found.findings)
    parts = [
        f"{n} {word}{'' if n == 1 else 's'}"
        for n, word in ((problems, "problem"), (warnings, "warning"))
        if n
    ]
    return f"{' and '.join(parts)} found." if parts else "Nothing is wrong."


def _bounds(bounds: Bounds, busy: bool, few_tokens: float | None) -> list[str]:
    context = f"{bounds.target.context:,}"
    lines = _wrapped(
        "What memory bandwidth allows at batch 1: a step reads every weight once, and the KV of "
        f"{context} tokens, as fast as the fastest read. Real steps take longer, a small draft's most of all."
        + (" The machine was busy: on a quiet one more may be possible." if busy else "")
    )
    lines += ["", *_steps([("target", bounds.target), ("draft", bounds.draft)])]
    if bounds.draft is None:
        lines.append("  draft   none: the table below is for one that costs nothing, such as ngram")
    lines += ["", *_table(bounds), "", *_wrapped(sentence(bounds, few_tokens))]
    return lines


def _steps(steps: list[tuple[str, StepBound | None]]) -> list[str]:
    return [
        f"  {role:<6}  {_mb(step.weight_bytes)} of weights + {_mb(step.kv_bytes)} of KV: "
        f"at least {_ms(step.seconds)} a step, at most {step.tokens_per_second:,.3g} tokens/s"
        for role, step in steps
        if step is not None
    ]


def _table(bounds: Bounds) -> list[str]:
    header = ["speedup at most", *(f"α = {alpha:g}" for alpha in bounds.acceptances), "break-even α"]
    body = []
    for row in bounds.rows:
        costly = " *" if row.verification_is_free is False else ""
        best = row.label.startswith("best")
        cells = [
            f"{speedup:.2f}" + (f" (k={k})" if best else "")
            for k, speedup in zip(row.k, row.speedups, strict=True)
        ]
        body.append([row.label + costly, *cells, _break_even(row, best)])
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    lines = [
        "  "
        + "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in (header, *body)
    ]
    if any(row.verification_is_free is False for row in bounds.rows):
        lines.append(
            "  * k + 1 tokens are beyond the ridge, where verification costs more than an ordinary step"
        )
    return [line.rstrip() for line in lines]


def _break_even(row: Row, best: bool) -> str:
    if best:
        return ""
    return "–" if row.break_even is None else f"{row.break_even:.2f}"


def sentence(bounds: Bounds, few_tokens: float | None = None) -> str:
    """Say the bounds in words; `few_tokens` is the measured time of four tokens / of one."""
    highest = bounds.rows[-1]
    speedup, k, alpha = highest.speedups[-1], highest.k[-1], bounds.acceptances[-1]
    ratio = bounds.cost_ratio
    if bounds.draft is None:
        parts = ["A draft that costs nothing"]
    else:
        parts = [f"By its bytes, a drafted token costs {ratio:.2f} of a target step (c). Such a draft"]
    if k == 0:
        parts.append(f"does not pay even at acceptance {alpha:g}.")
    else:
        parts.append(f"makes decoding at most {speedup:.2f} times as fast at acceptance {alpha:g} (k = {k})")
        least = bounds.rows[0].break_even
        parts.append(
            f"and gains nothing below acceptance {least:.2f}." if least else "and, by the bytes, never loses."
        )
    if bounds.ridge_tokens is None:
        parts.append("Where arithmetic begins to bound is unknown: this dtype was not measured.")
    else:
        parts.append(
            f"Up to {bounds.ridge_tokens:.0f} tokens a step, counted over all requests, reading the weights "
            "takes longer than the arithmetic; beyond that ridge verification is no longer free."
        )
    if few_tokens is not None and few_tokens > SLOW_FEW_TOKENS:
        parts.append(
            f"Measured, it is not free below it either: {TOKENS} tokens take {few_tokens:.1f} times one."
        )
    return " ".join(parts)


def _wrapped(paragraph: str) -> list[str]:
    return textwrap.wrap(paragraph, _WIDTH, break_on_hyphens=False)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
