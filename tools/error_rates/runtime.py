"""Audits of innocent strategies through the real runtime: every part of the audit, and no alarm allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specbench.audit import self_test, session
from specbench.audit.budget import RUN_ALPHA, budget_named

BUDGET = budget_named("quick")
AUDITS = 100
BRANCH_PROMPTS = self_test.PROMPTS[:2]
"""Of the chi-squared check, which the self-test leaves out."""


def setup(seed: int) -> dict[str, Any]:
    """Return what the log's figures depend on."""
    return {"budget": BUDGET.name, "tokens": BUDGET.tokens, "seed": seed}


def innocent() -> dict[str, self_test.Case]:
    """Return the lossless variants that are audited in turn, by name."""
    return {case.name: case for case in self_test.cases() if case.expected == "innocent"}


def wanted(audits: int) -> dict[str, int]:
    """Share out a number of audits over the variants, the first ones getting what does not divide."""
    names = list(innocent())
    return {name: len(range(place, audits, len(names))) for place, name in enumerate(names)}


def audit(bench: self_test.Bench, name: str, number: int, seed: int) -> dict[str, Any]:
    """Audit one variant with a seed of its own, alone in its run: the whole error budget is its."""
    variants = innocent()
    own = seed * 1_000_003 + number * len(variants) + list(variants).index(name)
    subject = replace(
        bench.subject(self_test.Job(variants[name], own)), budget=BUDGET, branch_prompts=BRANCH_PROMPTS
    )
    record = session.audit(subject, variants[name].strategy)
    return {
        "seed": own,
        "tokens": record.tokens,
        "components": [component.name for component in record.components],
        "alarms": [component.name for component in record.components if component.alarm],
    }


def summary(done: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Count the alarms of every part of the audit."""
    variants = {
        name: {
            "audits": len(audits),
            "tokens": sum(audit["tokens"] for audit in audits),
            "alarms": sum(bool(audit["alarms"]) for audit in audits),
        }
        for name, audits in done.items()
    }
    every = [audit for audits in done.values() for audit in audits]
    judged = Counter(name for audit in every for name in audit["components"])
    alarmed = Counter(name for audit in every for name in audit["alarms"])
    alarms = sum(row["alarms"] for row in variants.values())
    return {
        "audits": len(every),
        "alarms": alarms,
        "expected_at_most": len(every) * RUN_ALPHA,
        "variants": variants,
        "components": {name: {"audits": judged[name], "alarms": alarmed[name]} for name in judged},
        "holds": False if alarms else len(every) >= AUDITS or None,
    }
