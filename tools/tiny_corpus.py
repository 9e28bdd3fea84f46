"""What the bundled pair is trained on: the Python standard library, and small tasks made from it.

The library's own source and documentation (PSF-2.0, on every machine that runs Python) gives code and
technical English. Tasks in a fixed form, generated from a seed, give the pair something to be predictable
about: copying, renaming, turning records into JSON, labels. Modules in `HELD_OUT` and the seeds from
`HELD_OUT_SEED` on are never trained on: prompts are made from those.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {
    "test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "encodings", "__pycache__",
    "turtledemo", "ensurepip", "_bundled", "config",
}  # fmt: skip
HELD_OUT = {
    "argparse.py", "calendar.py", "configparser.py", "fractions.py", "heapq.py", "mailbox.py",
    "pathlib.py", "queue.py", "shlex.py", "statistics.py", "textwrap.py", "zipfile.py",
}  # fmt: skip
HELD_OUT_SEED = 1_000_000

FIRST = [
    "Ada",
    "Bruno",
    "Chloe",
    "Dmitri",
    "Elif",
    "Farid",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Keiko",
    "Lars",
    "Mina",
    "Nils",
    "Olga",
    "Pablo",
    "Rosa",
    "Sven",
    "Tara",
]
LAST = [
    "Abe",
    "Berg",
    "Costa",
    "Diaz",
    "Egger",
    "Fonseca",
    "Gruber",
    "Holm",
    "Ito",
    "Jansen",
    "Kaya",
    "Lund",
    "Moreau",
    "Novak",
    "Okafor",
    "Petit",
    "Rossi",
]
CITY = [
    "Lyon",
    "Oslo",
    "Porto",
    "Quito",
    "Riga",
    "Sofia",
    "Turin",
    "Utrecht",
    "Vienna",
    "Warsaw",
    "Zagreb",
    "Bergen",
    "Cork",
    "Delft",
    "Essen",
    "Faro",
]
ITEM = [
    "lamp",
    "chair",
    "table",
    "kettle",
    "mirror",
    "ladder",
    "basket",
    "clock",
    "carpet",
    "shelf",
    "drill",
    "heater",
    "fan",
    "radio",
    "bucket",
    "rope",
]
COLOUR = ["red", "green", "blue", "white", "black", "grey", "yellow", "orange", "brown", "violet"]
STATUS = ["open", "closed", "pending", "shipped", "returned"]
TEAMS = {
    "billing": ("invoice", "refund", "charge", "receipt", "price"),
    "shipping": ("parcel", "delivery", "courier", "address", "tracking"),
    "technical": ("error", "crash", "login", "update", "password"),
    "sales": ("offer", "discount", "quote", "order", "contract"),
}


def library_files() -> list[Path]:
    """Return the standard library's Python files, sorted, without tests and tables."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(
        path
        for path in root.rglob("*.py")
        if not SKIPPED.intersection(path.relative_to(root).parts[:-1]) and path.stat().st_size < 1_000_000
    )


def documents(*, held_out: bool) -> list[tuple[str, str]]:
    """Return (name, text) of the library's files: those trained on, or those held out."""
    found = []
    for path in library_files():
        if (path.name in HELD_OUT) != held_out:
            continue
        text = path.read_text("utf-8", errors="ignore")
        if path.name == "topics.py":  # the language reference, kept as Python strings
            namespace: dict[str, dict[str, str]] = {}
            exec(compile(text, path.name, "exec"), namespace)  # the standard library's own file
            text = "\n\n".join(namespace["topics"].values())
        if text.isascii() and len(text) > 200:
            found.append((path.name, text))
    return found


def digest() -> str:
    """Return a hash of all that is trained on from the library."""
    total = hashlib.sha256()
    for name, text in documents(held_out=False):
        total.update(name.encode() + b"\0" + text.encode())
    return total.hexdigest()


def functions(texts: list[tuple[str, str]]) -> list[str]:
    """Return top-level functions and classes of 150 to 900 characters."""
    found = []
    for _, text in texts:
        for block in re.split(r"\n(?=def |class )", text):
            block = re.split(r"\n(?=[^\s#)\]}])", block)[0].rstrip()
            if block.startswith(("def ", "class ")) and 150 <= len(block) <= 900:
                found.append(block)
    return found


def paragraphs(texts: list[tuple[str, str]]) -> list[str]:
    """Return paragraphs of prose: docstrings and documentation, 80 to 500 characters."""
    found = []
    for _, text in texts:
        for block in re.split(r"\n\s*\n", text):
            words = " ".join(block.split())
            letters = sum(c.isalpha() or c == " " for c in words)
            if 80 <= len(words) <= 500 and letters > 0.88 * len(words) and words[0].isupper():
                found.append(words)
    return found


def task(seed: int, blocks: list[str], prose: list[str]) -> tuple[str, str, str]:
    """Return (kind, prompt, answer) of one generated task."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    prompt, answer = globals()[f"_{kind.replace('-', '_')}"](rng, blocks, prose)
    return kind, prompt, answer


def _copy_code(rng: random.Random, blocks: list[str], prose: list[str]) -> tuple[str, str]:
    del prose
    block = rng.choice(blocks)
    return f"# Task: repeat the code.\n{block}\n# Answer:\n", block


def _rename(rng: random.Random, blocks: list[str], prose: list[str]) -> tuple[str, str]:
    del prose
    block = rng.choice(blocks)
    names = sorted(set(re.findall(r"\b[a-z_]{4,12}\b", block)) - {"self", "return", "class", "None"})
    old = rng.choice(names) if names else "self"
    new = rng.choice(("value", "item", "total", "result", "entry", "source", "target", "count"))
    changed = re.sub(rf"\b{re.escape(old)}\b", new, block)
    return f"# Task: rename {old} to {new}.\n{block}\n# Answer:\n", changed


def _quote(rng: random.Random, blocks: list[str], prose: list[str]) -> tuple[str, str]:
    del blocks
    text = "\n".join(rng.sample(prose, rng.randint(1, 3)))
    return f"# Task: quote the text.\n{text}\n# Answer:\n", text


def _record(rng: random.Random) -> dict[str, str | int]:
    fields: list[tuple[str, str | int]] = [
        ("name", f"{rng.choice(FIRST)} {rng.choice(LAST)}"),
        ("city", rng.choice(CITY)),
        ("item", f"{rng.choice(COLOUR)} {rng.choice(ITEM)}"),
        ("order", rng.randint(1000, 99999)),
        ("status", rng.choice(STATUS)),
        ("amount", rng.randint(1, 40)),
    ]
    chosen = rng.sample(fields, rng.randint(3, 6))
    return dict(chosen)


def _to_json(rng: random.Random, blocks: list[str], prose: list[str]) -> tuple[str, str]:
    del blocks, prose
    records = [_record(rng) for _ in range(rng.randint(1, 5))]
    lines = "\n".join("; ".join(f"{key}: {value}" for key, value in r.items()) for r in records)
    answer = "\n".join(json.dumps(r) for r in records)
    return f"# Task: write each record as JSON.\n{lines}\n# Answer:\n", answer


def _to_list(rng: random.Random, blocks: list[str], prose: list[str]) -> tuple[str, str]:
    del blocks, prose
    things = [f"{rng.choice(COLOUR)} {rng.choice(ITEM)}" for _ in range(rng.randint(4, 14))]
    if rng.random() < 0.5:
        return f"# Task: one item a line.\n{', '.join(things)}\n# Answer:\n", "\n".join(
            f"- {t}" for t in things
        )
    lines = "\n".join(f"- {t}" for t in things)
    return f"# Task: join the items.\n{lines}\n# Answer:\n", ", ".join(things)


def _route(rng: random.Random, blocks: list[str], prose: list[str]) -> tuple[str, str]:
    del blocks, prose
    team = rng.choice(sorted(TEAMS))
    one, two = rng.sample(TEAMS[team], 2)
    text = rng.choice(
        (
            f"{rng.choice(FIRST)} asks about the {one} and the {two} of the {rng.choice(ITEM)}.",
            f"A problem with the {one} for {rng.choice(FIRST)} {rng.choice(LAST)} in {rng.choice(CITY)}.",
            f"Please look at the {one}: the {two} is wrong.",
        )
    )
    return f"# Task: billing, shipping, technical or sales?\n{text}\n# Answer:\n", team


def _number(rng: random.Random, blocks: list[str], prose: list[str]) -> tuple[str, str]:
    del blocks, prose
    record = _record(rng)
    record.setdefault("order", rng.randint(1000, 99999))
    text = ", ".join(f"{key} {value}" for key, value in record.items())
    return f"# Task: give the order number.\n{text}\n# Answer:\n", str(record["order"])


def _contains(rng: random.Random, blocks: list[str], prose: list[str]) -> tuple[str, str]:
    del blocks, prose
    things = [f"{rng.choice(COLOUR)} {rng.choice(ITEM)}" for _ in range(rng.randint(3, 8))]
    wanted = rng.choice(things) if rng.random() < 0.5 else f"{rng.choice(COLOUR)} {rng.choice(ITEM)}"
    answer = "yes" if wanted in things else "no"
    return f"# Task: is {wanted} in the list?\n{', '.join(things)}\n# Answer:\n", answer


KINDS = ("copy-code", "rename", "quote", "to-json", "to-list", "route", "number", "contains")


def task_stream(start: int, blocks: list[str], prose: list[str]) -> Iterator[str]:
    """Yield task texts, prompt and answer, from seed `start` on."""
    seed = start
    while True:
        _, prompt, answer = task(seed, blocks, prose)
        yield prompt + answer
        seed += 1
