"""Reading prompts from a data set on the hub: the one place that uses the `datasets` library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specbench.errors import WorkloadError, did_you_mean
from specbench.workloads.prompt import Prompt
from specbench.workloads.rows import fail, prompts_from

COLUMNS = ("prompt", "messages", "text", "question", "instruction")
_HINT = "write hub:ORG/NAME, hub:ORG/NAME:test or hub:ORG/NAME:test:question"
_SPEC = re.compile(r"hub:(?P<name>[^:\s]+)(:(?P<split>\w[^:\[\]]*(\[[^\]]*\])?))?(:(?P<column>[^:]+))?")


def read_hub(spec: str) -> tuple[str, tuple[Prompt, ...]]:
    """Load `hub:ORG/NAME[:split[:column]]` and return a short name and its prompts.

    The split is `train` unless given, and may be sliced (`train[:200]`). A configuration is a third
    part of the name (`hub:openai/gsm8k/main:test`). Without a column the first of `COLUMNS` that
    exists is taken. `prompt` and `text` are continued as they are; `question` and `instruction`
    become a user's message; of `messages`, a closing answer by the assistant is dropped.

    Raises:
        WorkloadError: The data set cannot be reached, is not there, or has no usable column.
    """
    match = _SPEC.fullmatch(spec)
    if match is None or len(match["name"].split("/")) > 3:
        raise WorkloadError(f"cannot read '{spec}' as a data set", hint=_HINT)
    parts = match["name"].split("/")
    name, config = "/".join(parts[:2]), "/".join(parts[2:]) or None
    table = _download(spec, name, config, match["split"] or "train")
    columns = list(table.column_names)
    column = match["column"] or next((known for known in COLUMNS if known in columns), None)
    if column is None:
        fail(spec, f"has none of the columns {', '.join(COLUMNS)}; it has {', '.join(columns)}", _HINT)
    if column not in columns:
        near = did_you_mean(column, columns)
        fail(spec, f"no column '{column}'{near}; it has {', '.join(columns)}", _HINT)
    rows = [(f"{spec}, row {i}", f"row-{i}", _row(column, row)) for i, row in enumerate(table)]
    if not rows:
        fail(spec, "the data set is empty", _HINT)
    return parts[min(1, len(parts) - 1)], prompts_from(rows)


def _row(column: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Name the content of one row as a prompt file would."""
    value = row[column]
    kept = {
        key: row[key] for key in ("category", "domain") if isinstance(row.get(key), str) and row[key].strip()
    }
    if isinstance(value, list):
        while value and isinstance(value[-1], Mapping) and value[-1].get("role") == "assistant":
            value = value[:-1]
        return {**kept, "turns" if value and isinstance(value[0], str) else "messages": value}
    if column in ("question", "instruction") and isinstance(value, str):
        extra = row.get("input")  # instruction sets often keep the text to work on in this column
        parts = [value, extra] if isinstance(extra, str) and extra.strip() else [value]
        return {**kept, "messages": [{"role": "user", "content": "\n\n".join(parts)}]}
    return {**kept, "prompt": value}


def _download(spec: str, name: str, config: str | None, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except datasets.exceptions.DatasetNotFoundError as error:
        fail(
            spec, f"not found on the hub, or not public: {_first_line(error)}", "check the spelling; " + _HINT
        )
    except ValueError as error:  # no such split or configuration
        fail(spec, f"cannot be loaded: {_first_line(error)}", _HINT)
    except (OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        fail(
            spec,
            f"cannot be loaded from the hub: {_first_line(error)}",
            "offline, use a bundled workload or a .jsonl file",
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
