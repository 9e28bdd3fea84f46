"""Measure how often the audit errs, and write it down: results/audit/error_rates.{json,md}.

Five claims are put to the test, in four parts:

    e-process    lossless decoders on toy models raise no more alarms than the level allows, their evidence
                 reaches 20 at most one time in 20, and its mean is at most 1; faults from twice the
                 smallest detectable effect on are found in 99 of 100 audits (see error_rates/e_process.py)
    p-values     under the null a share a of them is at most a
    runtime      innocent strategies, audited through the real runtime, raise no alarm
    normalisers  every alternative is a law at every token of an audit

Each part keeps a log; stop it at any time: it goes on where it was. The two documents are made anew from
the logs each time. Exit code 1 if a claim is broken, 2 if the call makes no sense, else 0, measured in full
or not.

    python tools/audit_error_rates.py
    python tools/audit_error_rates.py --parts e-process --minutes 3 --out rates
    python tools/audit_error_rates.py --parts e-process --rules rejection --faults none --audits 5000
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from error_rates import document, e_process, normalisers, p_values, runtime
from error_rates.logs import Log, write

from specbench.audit import self_test, toy
from specbench.errors import UsageError, did_you_mean

PARTS = ("e-process", "p-values", "runtime", "normalisers")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default="all", help="comma-separated, all, or none: only write the tables")
    parser.add_argument("--audits", type=int, default=e_process.RULE_AUDITS, help="of each lossless rule")
    parser.add_argument("--fault-audits", type=int, default=e_process.FAULT_AUDITS, help="of each fault")
    parser.add_argument("--p-values", type=int, default=p_values.P_VALUES, help="of each kind")
    parser.add_argument("--runtime-audits", type=int, default=runtime.AUDITS, help="over the strategies")
    parser.add_argument("--budget", type=int, default=60_000, help="tokens of one audit on toy models")
    parser.add_argument("--alpha", type=float, default=0.6e-3 / 4, help="level of one audit on toy models")
    parser.add_argument("--rules", default="all", help="comma-separated, all, or none")
    parser.add_argument("--faults", default="all", help="comma-separated, all, or none")
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=None, help="stop measuring after so many")
    parser.add_argument("--out", type=Path, default=Path("results/audit"))
    return parser.parse_args()


def chosen(text: str, known: Iterable[str]) -> list[str]:
    """Return the names that a list on the command line means."""
    if text in ("all", "none"):
        return list(known) if text == "all" else []
    names, known = text.split(","), list(known)
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"no '{unknown[0]}'{did_you_mean(unknown[0], known)}",
            hint=f"choose some of {', '.join(known)}, or all, or none",
        )
    return names


def check(options: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing."""
    for name in ("audits", "fault_audits", "p_values", "runtime_audits", "seed"):
        if getattr(options, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(options, name)}; expected 0 or more")
    if not 0 < options.alpha < 1:
        raise UsageError(f"--alpha is {options.alpha:g}; expected a number between 0 and 1")
    if options.budget < 1 or options.vocab < 4:
        raise UsageError(
            f"--budget is {options.budget}, --vocab {options.vocab}; expected 1 or more, and 4 or more"
        )


class Bench:
    """The four parts: their logs, and what has to be measured for each."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Open the logs of the parts that were begun, and of those that are to be."""
        self.options = options
        self.parts = chosen(options.parts, PARTS)
        self.stop = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
        options.out.mkdir(parents=True, exist_ok=True)
        self.setup = e_process.Setup(options.budget, options.alpha, options.vocab, options.seed)
        self.audits = self._log("e-process", "audits", self.setup.plain(), "audits")
        self.p_values = self._log("p-values", "p_values", p_values.setup(options.seed), "p_values")
        self.runtime = self._log("runtime", "runtime", runtime.setup(options.seed), "audits")
        self.normalisers = self._log("normalisers", "normalisers", normalisers.setup(options.seed), "audits")
        self.looks: dict[str, Mapping[str, e_process.Sight]] = {}
        self.bar = math.nan

    def _log(self, part: str, name: str, setup: Mapping[str, Any], field: str) -> Log | None:
        path = self.options.out / f"error_rates.{name}.jsonl"
        return Log(path, setup, field) if part in self.parts or path.exists() else None

    @property
    def has_time(self) -> bool:
        """Whether to go on measuring."""
        return time.monotonic() < self.stop

    def measure(self) -> None:
        """Measure what is still to be measured."""
        if "e-process" in self.parts:
            self._measure_audits()
        if self.audits is not None:
            self._look_at_faults()
        if "e-process" in self.parts:
            self._settle_doubts()
        if "p-values" in self.parts:
            self._measure_p_values()
        if "runtime" in self.parts:
            self._measure_runtime()
        if "normalisers" in self.parts:
            self._measure_normalisers()

    def _measure_audits(self) -> None:
        options = self.options
        wanted = {f"rule:{name}": options.audits for name in chosen(options.rules, toy.RULES)}
        wanted |= {f"fault:{name}": options.fault_audits for name in chosen(options.faults, toy.FAULTS)}
        self._run_audits(wanted)

    def _run_audits(self, wanted: Mapping[str, int]) -> None:
        assert self.audits is not None
        pairs = self.setup.pairs()
        while self.has_time and (case := self.audits.furthest_behind(wanted)) is not None:
            batch = self.audits.num(case) // e_process.BATCH
            self.audits.add(case, e_process.audit_batch(pairs, self.setup, case, batch))
            said(case, self.audits, wanted)

    def _look_at_faults(self) -> None:
        """Work out which faults must be found; needs no log, and is the same every time."""
        assert self.audits is not None
        names = [name for name in toy.FAULTS if self.audits.num(f"fault:{name}")]
        if not names:
            return
        pairs = self.setup.pairs()
        planned = e_process.instrument(pairs, self.setup)
        self.bar = e_process.log_bar(planned)
        self.looks = {
            name: e_process.sights(pairs, toy.FAULTS[name], planned, self.setup.seed) for name in names
        }

    def _settle_doubts(self) -> None:
        """Go on with promised faults that were found in 97 or 98 of 100."""
        assert self.audits is not None
        wanted = {}
        for name in chosen(self.options.faults, toy.FAULTS):
            if name not in self.looks:
                continue
            audits = self.audits.done[f"fault:{name}"]
            promised = any(sight.is_promised for sight in self.looks[name].values())
            needed = e_process.audits_needed(audits, promised, len(audits))
            if needed > len(audits):
                wanted[f"fault:{name}"] = needed
        self._run_audits(wanted)

    def _measure_p_values(self) -> None:
        assert self.p_values is not None
        wanted = dict.fromkeys(p_values.KINDS, self.options.p_values)
        while self.has_time and (kind := self.p_values.furthest_behind(wanted)) is not None:
            batch = self.p_values.num(kind) // p_values.BATCH
            self.p_values.add(kind, p_values.batch_of(kind, batch, self.options.seed))
            said(kind, self.p_values, wanted)

    def _measure_runtime(self) -> None:
        assert self.runtime is not None
        wanted = runtime.wanted(self.options.runtime_audits)
        bench = self_test.Bench()
        while self.has_time and (name := self.runtime.furthest_behind(wanted)) is not None:
            number = self.runtime.num(name)
            self.runtime.add(name, [runtime.audit(bench, name, number, self.options.seed)])
            said(name, self.runtime, wanted)

    def _measure_normalisers(self) -> None:
        assert self.normalisers is not None
        wanted = dict.fromkeys(normalisers.TOKENS, 1)
        bench = self_test.Bench()
        while self.has_time and (model := self.normalisers.furthest_behind(wanted)) is not None:
            tokens = normalisers.TOKENS[model]
            self.normalisers.add(model, [normalisers.audit(bench, model, tokens, self.options.seed)])
            said(model, self.normalisers, wanted)

    def document(self) -> dict[str, Any]:
        """Return everything measured so far; sections that were not begun are left out."""
        sections: dict[str, Any] = {}
        if self.audits is not None:
            sections["rules"] = e_process.summary_of_rules(self.audits.done, self.setup.alpha)
            sections["faults"] = e_process.summary_of_faults(self.audits.done, self.looks, self.bar)
        if self.p_values is not None:
            sections["p_values"] = p_values.summary(self.p_values.done)
        if self.runtime is not None:
            sections["runtime"] = runtime.summary(self.runtime.done)
        if self.normalisers is not None:
            sections["normalisers"] = normalisers.summary(self.normalisers.done)
        held = [section["holds"] for section in sections.values()]
        complete = len(sections) == len(document.HEADLINES) and None not in held
        return {
            "holds": False if False in held else complete or None,
            "setup": self.setup.plain(),
            "runtime_setup": runtime.setup(self.options.seed),
            **sections,
        }


def said(case: str, log: Log, wanted: Mapping[str, int]) -> None:
    """Tell how far a case has come."""
    print(f"{case}: {log.num(case)} of {wanted[case]}", file=sys.stderr)


def main() -> None:
    """Measure, write both documents, and print the page."""
    options = arguments()
    try:
        check(options)
        bench = Bench(options)
        bench.measure()
    except UsageError as error:
        hint = f"\n\nhint: {error.hint}" if error.hint else ""
        print(f"error: {error.message}{hint}", file=sys.stderr)
        sys.exit(2)
    found = bench.document()
    page = document.markdown(found)
    write(options.out / "error_rates.json", json.dumps(found, indent=1) + "\n")
    write(options.out / "error_rates.md", page)
    print(page)
    sys.exit(1 if found["holds"] is False else 0)


if __name__ == "__main__":
    main()
