"""Reading prompts from local files: JSON Lines and plain text.

The `datasets` library is used for the hub only. For a local file it would be a loss: importing it
takes longer than everything else here together, its JSON reader gives all rows the union of their
columns, and its errors name a table and not the line that somebody has to correct.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specbench.errors import did_you_mean
from specbench.workloads.prompt import Prompt
from specbench.workloads.rows import fail, prompt_from, prompts_from

_EMPTY = "expected prompts, or a header that names a file of them"


def read_text(path: Path) -> str:
    """Return a file's text with Unix line ends and no byte-order mark, or say why it cannot be read."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        near = did_you_mean(path.name, _siblings(path))
        fail(str(path), f"no such file{near}", "check the spelling; paths are relative to where you are")
    except IsADirectoryError:
        inside = [name for name in _siblings(path / "x") if name.endswith((".yaml", ".jsonl", ".txt"))]
        fail(str(path), "is a directory", f"name a file in it{': ' if inside else ''}{', '.join(inside[:4])}")
    except OSError as error:
        fail(str(path), f"cannot be read: {error.strerror}", "check the file and its permissions")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        fail(f"{path}, line {line}", "is not UTF-8", "convert the file: iconv -f LATIN1 -t UTF-8 FILE")
    text = text.replace("\r\n", "\n")
    if not text:
        fail(str(path), "the file is empty", _EMPTY)
    if not text.strip():
        fail(str(path), "the file holds only blank lines", _EMPTY)
    return text


def content_digest(text: str) -> str:
    """Return the SHA-256 of a text, whose line ends `read_text` has made the same on all systems."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_prompts(path: Path, text: str) -> tuple[Prompt, ...]:
    """Read prompts from the text of a file, as its suffix says: plain text, or else JSON Lines."""
    return read_txt(path, text) if path.suffix.lower() == ".txt" else read_jsonl(path, text)


def read_jsonl(path: Path, text: str) -> tuple[Prompt, ...]:
    """Read a prompt from each line that is not blank."""
    return prompts_from(_json_rows(path, text))


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, str, Any]]:
    # Not splitlines(): a JSON string may hold U+2028 and other characters that it would split at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            hint = "one JSON object per line; a list that spans lines is not JSON Lines"
            fail(where, f"invalid JSON: {error.msg} (column {error.colno})", hint)
        except (ValueError, RecursionError) as error:  # a number with thousands of digits, deep nesting
            fail(where, f"invalid JSON: {error}")
        yield where, f"line-{number}", value


def read_txt(path: Path, text: str) -> tuple[Prompt, ...]:
    """Read plain text to be continued: each line that is not blank is a prompt.

    If some line consists of `---` alone, the prompts are instead the blocks between such lines, with
    the line breaks inside them kept. A file that ends with `---` is thus one long prompt.
    """
    lines = text.split("\n")
    blocks: list[tuple[int, str]] = []
    if any(line.strip() == "---" for line in lines):
        start = 0
        for number, line in enumerate([*lines, "---"]):
            if line.strip() == "---":
                blocks.append((start + 1, "\n".join(lines[start:number]).strip("\n")))
                start = number + 1
    else:
        blocks = [(number, line.rstrip()) for number, line in enumerate(lines, start=1)]
    rows = [(number, block) for number, block in blocks if block.strip()]
    if not rows:
        fail(str(path), "has separators but no prompt between them", "put text between the lines of ---")
    return tuple(
        prompt_from(f"{path}, line {number}", f"line-{number}", {"prompt": block}) for number, block in rows
    )


def _siblings(path: Path) -> list[str]:
    try:
        return sorted(other.name for other in path.parent.iterdir())
    except OSError:
        return []
