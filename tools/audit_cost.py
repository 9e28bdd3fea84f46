"""Measure what scoring and testing cost beside the generation they judge, and write it down.

Ordinary decoding of the audited batch and the judgement of its outputs take turns in one process, batch by
batch, as they do in an audit; what is compared are the medians. All alternatives are tested, with the
synthetic draft of acceptance .7. A ratio of 1 says that judging costs as much as generating.

    python tools/audit_cost.py
    python tools/audit_cost.py --models smollm2 --rounds 5 --out none
"""

from __future__ import annotations

import argparse
import statistics
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from specbench import models
from specbench.audit import session
from specbench.audit.budget import budget_named
from specbench.audit.reference import Oracle
from specbench.bench.audit import MARGIN, PROMPTS, ROWS
from specbench.bench.config import MODEL_SETS
from specbench.engines.local import LocalEngine
from specbench.records import SamplingParams
from specbench.runtime.allocator import keep_freed_memory

ALLOWED = 1.0
"""The most that judging may cost, in generations."""
HEAD = """\
# What judging costs beside generating

`{command}`, {day}: {software}, {threads} threads, float32. Ordinary decoding of {rows} rows, outputs of up to
{output} tokens to {prompts} prompts. Judging is one plain forward of each text with its prompt, every
alternative of the e-process, what they could have found, collisions and the PIT. Medians over batches, with
their range.

| models | tokens | generating, ms/token | judging, ms/token | ratio |
| :-- | --: | --: | --: | --: |
"""


def measure(name: str, rounds: int) -> list[tuple[int, float, float]]:
    """Return tokens, seconds of decoding and of judging of each batch, after one that is not counted."""
    loaded = models.load(models.resolve(MODEL_SETS[name].target), dtype="float32")
    prompts = tuple(tuple(loaded.tokenizer(text)["input_ids"]) for text in PROMPTS)
    sampling = SamplingParams(max_new_tokens=session.OUTPUT_TOKENS)
    engine = LocalEngine(
        loaded.model,
        eos_ids=loaded.eos_token_ids,
        tokenizer=loaded.tokenizer,
        rows=ROWS,
        width=max(map(len, prompts)) + MARGIN,
    )
    subject = session.Subject(
        engine=engine,
        sampling=sampling,
        prompts=prompts,
        branch_prompts=(),
        budget=budget_named("deep"),
        strategies=1,
        seed=0,
        dtype="float32",
        scales=session.calibrate_regimes(Oracle(loaded.model, sampling, loaded.eos_token_ids), prompts),
    )
    auditor = session.Auditor(subject, "ordinary", lambda strategy: strategy, lambda _: None)
    found: list[tuple[int, float, float]] = []
    for _ in range(rounds + 1):
        tokens, decoding, scoring = auditor.e_process.tokens, auditor.decoding_s, auditor.scoring_s
        auditor.draw_from(auditor.regimes[0])
        found.append(
            (auditor.e_process.tokens - tokens, auditor.decoding_s - decoding, auditor.scoring_s - scoring)
        )
    return found[1:]


def main() -> int:
    """Measure every model set and write the table; exit code 1 if judging costs more than generating."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="tiny,smollm2", help="comma-separated model sets")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", default="results/audit/cost.md", help="a file, or none")
    options = parser.parse_args()
    keep_freed_memory()
    rows = []
    dearest = 0.0
    for name in options.models.split(","):
        found = measure(name, options.rounds)
        decoding = statistics.median(1e3 * d / n for n, d, _ in found)
        scoring = statistics.median(1e3 * s / n for n, _, s in found)
        ratios = sorted(s / d for _, d, s in found)
        ratio = statistics.median(ratios)
        dearest = max(dearest, ratio)
        rows.append(
            f"| {name} | {sum(n for n, _, _ in found)} | {decoding:.3f} | {scoring:.3f} | {ratio:.2f} "
            f"[{ratios[0]:.2f}, {ratios[-1]:.2f}] |"
        )
        print(rows[-1], flush=True)
    if options.out != "none":
        command = f"python tools/audit_cost.py --models {options.models} --rounds {options.rounds}"
        software = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers"))
        head = HEAD.format(
            command=command,
            day=date.today(),
            software=software,
            threads=torch.get_num_threads(),
            rows=session.BATCH,
            output=session.OUTPUT_TOKENS,
            prompts=len(PROMPTS),
        )
        Path(options.out).write_text(head + "\n".join(rows) + "\n")
    return int(dearest > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
