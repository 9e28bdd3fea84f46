"""Audit the speculative decoding of transformers' `generate` on the bundled pair, as its authors could.

Each configuration is a function of prompts and sampling parameters, handed to `specbench.testing.audit` with
the target, in float32 on the CPU. Two of them are known to change the distribution, one by design and one by
a default, and must fail: without such a row a table of PASS would say little. Prints a markdown table.

    python tools/audit_generate.py --budget quick --output results/audit/generate.md
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import specbench
from specbench import models
from specbench.audit.draft_laws import CertainLaw
from specbench.bench.audit import PROMPTS
from specbench.strategies import ngram
from specbench.testing import LosslessResult, SamplingParams, audit

LOOKUP = 10


@dataclass
class Generate:
    """`model.generate`, prompt by prompt (it speculates at batch 1 only), counting what it drafts."""

    model: Any
    options: Mapping[str, Any]
    top_k: int | None = 0
    drafted: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)
    verified: int = field(default=0, init=False)

    def __call__(self, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
        """Return the new tokens."""
        torch.manual_seed(sampling.seed)
        with self._counting():
            return [self._one(prompt, sampling) for prompt in prompts]

    def _one(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        ids = torch.tensor([prompt])
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": 1.0}
        if self.top_k is not None:
            drawn["top_k"] = self.top_k
        before = self.verified
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sampling.max_new_tokens,
            **(drawn if sampling.temperature > 0 else {"do_sample": False}),
            **self.options,
        )
        new: list[int] = output[0, len(prompt) :].tolist()
        # A step emits what it accepts and one token more. Where EOS or the limit cuts it the last is missing.
        self.accepted += len(new) - (self.verified - before)
        return new

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the steps of the target and the drafts that each verifies: all the rows but one."""

        def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            del module, args
            self.verified += 1
            self.drafted += int(kwargs["logits_to_keep"]) - 1

        handle = self.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def counts(self) -> tuple[int, int]:
        """Return (drafted, accepted)."""
        return self.drafted, self.accepted


@dataclass(frozen=True)
class Case:
    """A configuration of `generate`, at a temperature; `broken` says what should make it fail."""

    name: str
    generate: Generate
    temperature: float
    draft: Any
    broken: str | None = None


def cases(decoder: Any, assistant: Any, adaptive: Any) -> Iterator[Case]:
    """Yield what is audited. The draft length of `adaptive` follows what was accepted, over calls too."""
    lookup = CertainLaw(ngram.NgramDrafter(ngram.Options(k=LOOKUP, min=1, max=2), torch.device("cpu")))
    for temperature in (1.0, 0.0):
        yield Case(
            "`assistant_model`",
            Generate(decoder, {"assistant_model": assistant}),
            temperature,
            assistant,
        )
        yield Case(
            f"`prompt_lookup_num_tokens={LOOKUP}`",
            Generate(decoder, {"prompt_lookup_num_tokens": LOOKUP}),
            temperature,
            lookup,
        )
    yield Case(
        "`assistant_model`, heuristic schedule, no confidence threshold",
        Generate(decoder, {"assistant_model": adaptive}),
        1.0,
        adaptive,
    )
    yield Case(
        "`assistant_model`, `assistant_ensemble_weight=0.8`",
        Generate(decoder, {"assistant_model": assistant, "assistant_ensemble_weight": 0.8}),
        1.0,
        assistant,
        "lossy by design: arXiv 2604.07622",
    )
    yield Case(
        "`assistant_model`, `top_k` not given",
        Generate(decoder, {"assistant_model": assistant}, top_k=None),
        1.0,
        assistant,
        "`generate` then samples among the 50 likeliest tokens",
    )


def row(case: Case, result: LosslessResult) -> str:
    """Return a line of the table."""
    direction, hidden = result.least_visible
    smallest = "–" if hidden is None or result.verdict == "FAIL" else f"{hidden:.3f} ({direction})"
    drafted, accepted = case.generate.counts()
    found = result.alternative if result.tokens_at_alarm is not None else "–"
    return (
        f"| {case.name} | {case.temperature:g} | {result.verdict} | {result.tokens} | {result.log_e:.1f} / "
        f"{result.bar:.1f} | {found} | {smallest} | {accepted}/{drafted} |"
    )


def report(lines: list[str], words: list[str], options: argparse.Namespace) -> str:
    """Return the document."""
    command = (
        f"python tools/audit_generate.py --budget {options.budget} --greedy-budget {options.greedy_budget} "
        f"--seed {options.seed}"
    )
    head = [
        "# transformers' `generate`, audited from outside",
        "",
        f"`{command}`, {time.strftime('%Y-%m-%d')}: specbench {specbench.__version__}, transformers "
        f"{transformers.__version__}, torch {torch.__version__}, python {platform.python_version()}. The "
        "bundled pair in float32 on the CPU, batch 1, outputs of up to 32 tokens. All else is `generate`'s "
        "default (20 draft tokens; a draft ends after a token less likely than .4), but `top_k=0`.",
        "",
        "| what | T | verdict | tokens | log e / bar | most like | smallest detectable TV | "
        "accepted/drafted |",
        "| :-- | --: | :-- | --: | --: | :-- | --: | --: |",
    ]
    return "\n".join([*head, *lines, "", *(f"- {text}" for text in words), ""])


def main() -> None:
    """Run the audits and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget", default="quick")
    parser.add_argument("--greedy-budget", default="4000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    # Two copies of the target: nothing that `generate` leaves in its own can reach the reference.
    reference = models.load("tiny", dtype="float32")
    decoder = models.load("tiny", dtype="float32").model
    assistant, adaptive = (models.load("tiny-draft", dtype="float32").model for _ in range(2))
    adaptive.generation_config.num_assistant_tokens = 4
    adaptive.generation_config.num_assistant_tokens_schedule = "heuristic"
    adaptive.generation_config.assistant_confidence_threshold = 0.0

    lines, words, wrong = [], [], []
    for case in cases(decoder, assistant, adaptive):
        result = audit(
            case.generate,
            reference.model,
            reference.tokenizer,
            PROMPTS,
            SamplingParams(temperature=case.temperature),
            budget=options.budget if case.temperature > 0 else options.greedy_budget,
            seed=options.seed,
            draft=case.draft,
            speculated=case.generate.counts,
            name=f"{case.name}, T={case.temperature:g}",
        )
        lines.append(row(case, result))
        if result.greedy is not None:
            words.append(f"{result.name}: {result.greedy.words}.")
        if result.verdict != "PASS":
            words.append(result.message + (f" Expected: {case.broken}." if case.broken else ""))
        if (result.verdict == "PASS") == (case.broken is not None):
            wrong.append(case.name)
        print(lines[-1], file=sys.stderr, flush=True)
    document = report(lines, words, options)
    print(document)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(document, encoding="utf-8")
    sys.exit(f"unexpected: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
