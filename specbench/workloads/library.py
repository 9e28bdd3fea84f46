"""From what a user typed to a workload: bundled name, file or data set."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from specbench.errors import WorkloadError, did_you_mean
from specbench.workloads import header
from specbench.workloads.files import content_digest, read_prompts, read_text
from specbench.workloads.hub import read_hub
from specbench.workloads.prompt import Prompt
from specbench.workloads.workload import Workload

_KINDS = ".yaml, .jsonl or .txt"


def bundled_folder() -> Path:
    """Return the folder of the bundled workloads: in an installed package, else at the top of a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "data", here.parents[1] / "workloads"):
        if any(folder.glob("*.yaml")):
            return folder
    raise WorkloadError("the bundled workloads are missing", hint="reinstall specbench, or name a file")


def available() -> list[str]:
    """Return the names of the bundled workloads without reading them."""
    return sorted(path.stem for path in bundled_folder().glob("*.yaml"))


def load(spec: str | Path) -> Workload:
    """Load the workload that a user named.

    Args:
        spec: The name of a bundled workload; a path to a workload's `.yaml`, to a `.jsonl` file with
            `prompt`, `messages` or Spec-Bench's `turns` on each line, or to a `.txt` file (see
            `read_txt`); or a data set, `hub:ORG/NAME[:split[:column]]`.

    Raises:
        WorkloadError: There is no such workload, or it is malformed.
    """
    if isinstance(spec, str):
        if spec.startswith("hub:"):
            name, prompts = read_hub(spec)
            return _with_defaults(name, spec, prompts, content_digest(_content(prompts)))
        known = available()
        if spec in known:
            return header.read_workload(bundled_folder() / f"{spec}.yaml", f"bundled:{spec}")
        if not _looks_like_a_path(spec):
            near = did_you_mean(spec, known)
            raise WorkloadError(
                f"no workload '{spec}'{near} (bundled: {', '.join(known)})",
                hint=f"give one of these names, or a path to a file ending in {_KINDS}",
            )
    return _load_file(Path(spec))


def load_many(specs: Iterable[str | Path], limit: int | None = None) -> list[Workload]:
    """Load several workloads, each limited to `limit` prompts if one is given.

    Raises:
        WorkloadError: As `load`, or two of them have the same name and could not be told apart.
    """
    workloads = [load(spec) for spec in specs]
    _require_distinct(workloads)
    return workloads if limit is None else [workload.limited(limit) for workload in workloads]


def with_twins(workloads: Iterable[Workload]) -> list[Workload]:
    """Return workloads, each that asks for it followed by itself without its grammars.

    Raises:
        WorkloadError: A twin has the name of another workload.
    """
    all_of_them = [each for w in workloads for each in ((w, w.free()) if w.without_grammar else (w,))]
    _require_distinct(all_of_them)
    return all_of_them


def _require_distinct(workloads: Iterable[Workload]) -> None:
    by_name: dict[str, Workload] = {}
    for workload in workloads:
        other = by_name.setdefault(workload.name, workload)
        if other is not workload:
            raise WorkloadError(
                f"two workloads are called '{workload.name}': {other.source} and {workload.source}",
                hint="rename one of the files, or give its YAML header another name",
            )


def _looks_like_a_path(spec: str) -> bool:
    if "/" in spec or "\\" in spec or Path(spec).suffix:
        return True
    return len(spec) < 256 and Path(spec).exists()  # asking about a longer name is an OSError


def _load_file(path: Path) -> Workload:
    kind = path.suffix.lower()
    if kind in (".yaml", ".yml"):
        return header.read_workload(path, str(path))
    text = read_text(path)
    if kind in (".jsonl", ".txt"):
        return _with_defaults(path.stem, str(path), read_prompts(path, text), content_digest(text))
    hint = "write one JSON object per line and call it .jsonl" if kind == ".json" else f"expected {_KINDS}"
    raise WorkloadError(f"{path}: cannot read prompts from a '{path.suffix or path.name}' file", hint=hint)


def _content(prompts: Iterable[Prompt]) -> str:
    """Return prompts as text to be hashed; a grammar counts only where there is one, as it came later."""
    fields = [asdict(prompt) for prompt in prompts]
    for each in fields:
        if each["grammar"] is None:
            del each["grammar"]
    return json.dumps(fields, sort_keys=True)


def _with_defaults(name: str, source: str, prompts: tuple[Prompt, ...], digest: str) -> Workload:
    return Workload(
        name=name,
        description=f"Prompts from {source}",
        licence="not stated",
        digest=digest,
        prompts=prompts,
        temperatures=header.TEMPERATURES,
        max_new_tokens=header.MAX_NEW_TOKENS,
        loads=header.LOADS,
        headline=header.HEADLINE,
        available=len(prompts),
        source=source,
    )
