"""Make the four workloads of the bundled pair from what it was not trained on.

    python tools/make_tiny_workloads.py

The four kinds keep their meaning: `tiny-predictable` repeats its input, `tiny-novel` continues code and
prose of held-out modules, `tiny-short-output` answers in a word or a number, `tiny-high-concurrency`
mixes them. Needs the Python whose standard library the committed files came from (3.11).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from pathlib import Path

import tiny_corpus as corpus

ROOT = Path(__file__).resolve().parents[1] / "workloads"
EACH = 16
MOST_CHARACTERS = 1_500

HEADERS = {
    "tiny-predictable": (
        "Tasks whose answer is mostly in the prompt, in the form the bundled pair was trained on.",
        96, ["c=1"], "decode",
    ),
    "tiny-novel": (
        "Openings of code and prose from modules of the standard library that were not trained on.",
        96, ["c=1"], "decode",
    ),
    "tiny-short-output": ("Routing, yes or no, numbers: answers of 1 to 16 tokens.", 16, ["c=1"], "e2e"),
    "tiny-high-concurrency": (
        "A mix of the three kinds under concurrent load.", 64,
        ["c=1", "c=8", "c=32", "poisson=0.7"], "throughput",
    ),
}  # fmt: skip
PREDICTABLE = ("copy-code", "rename", "quote", "to-json", "to-list")
SHORT = ("route", "number", "contains")


def tasks(kinds: tuple[str, ...], each: int, seed: int) -> list[dict[str, object]]:
    """Return `each` prompts of each kind from the seeds after `seed`."""
    held = corpus.documents(held_out=True)
    blocks, prose = corpus.functions(held), corpus.paragraphs(held)
    found: dict[str, list[str]] = {kind: [] for kind in kinds}
    while min(map(len, found.values())) < each:
        kind, prompt, _ = corpus.task(seed, blocks, prose)
        seed += 1
        known = kind in found and prompt in found[kind]
        if kind in found and len(found[kind]) < each and len(prompt) < MOST_CHARACTERS and not known:
            found[kind].append(prompt)
    return [
        {"id": f"{kind}-{n:02}", "category": kind, "domain": "generated", "prompt": found[kind][n]}
        for n in range(each)
        for kind in kinds
    ]


def openings(each: int, seed: int) -> list[dict[str, object]]:
    """Return beginnings of functions and paragraphs of held-out modules."""
    rng = random.Random(seed)
    held = corpus.documents(held_out=True)
    found: list[dict[str, object]] = []
    for kind, texts in (("code", corpus.functions(held)), ("prose", corpus.paragraphs(held))):
        texts = [t for t in texts if len(t) > 150]
        for number, text in enumerate(rng.sample(texts, min(each, len(texts)))):
            cut = text[: rng.randint(40, 110)].rstrip()
            found.append({"id": f"{kind}-{number:02}", "category": kind, "domain": "library", "prompt": cut})
    return sorted(found, key=lambda p: (str(p["id"])[-2:], str(p["category"])))


def main() -> None:
    """Write the files, or with --check say whether they are as this would write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT)
    options = parser.parse_args()
    start = corpus.HELD_OUT_SEED
    sets = {
        "tiny-predictable": tasks(PREDICTABLE, EACH, start),
        "tiny-novel": openings(40, 1),
        "tiny-short-output": tasks(SHORT, 27, start + 100_000),
        "tiny-high-concurrency": tasks(PREDICTABLE, 8, start + 200_000)
        + tasks(SHORT, 8, start + 300_000)
        + openings(12, 2),
    }
    for name, prompts in sets.items():
        seen: dict[str, int] = {}
        for prompt in prompts:
            key = str(prompt["id"])
            seen[key] = seen.get(key, 0) + 1
            assert seen[key] == 1, key
        text = "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts)
        (options.out / f"{name}.jsonl").write_text(text, "utf-8")
        description, tokens, loads, headline = HEADERS[name]
        (options.out / f"{name}.yaml").write_text(
            "# Written by tools/make_tiny_workloads.py; change it there.\n"
            f"name: {name}\ndescription: >-\n  {description}\n"
            "licence: PSF-2.0 (excerpts of the Python standard library) and CC0-1.0 (generated)\n"
            f"prompts: {name}.jsonl\nsha256: {hashlib.sha256(text.encode()).hexdigest()}\n"
            f"temperatures: [0, 1]\nmax_new_tokens: {tokens}\n"
            f"loads: [{', '.join(loads)}]\nheadline: {headline}\n",
            "utf-8",
        )
        print(name, len(prompts), max(len(str(p["prompt"])) for p in prompts))


if __name__ == "__main__":
    main()
