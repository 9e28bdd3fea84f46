"""`specbench list`: the names that may be used, read from files without importing what they name."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, get_args

import typer

import specbench
from specbench import registry
from specbench.errors import UsageError, did_you_mean

EXAMPLES = ("specbench list strategies", "specbench list metrics --json")

PACKAGE = Path(specbench.__file__).parent


@dataclass(frozen=True, slots=True)
class Entry:
    """One name, the `key=value` options it takes with their defaults, and what it is in a sentence.

    `group` is the heading it is listed under, if any: the class of a fault.
    """

    name: str
    options: str
    summary: str
    group: str | None = None


def list_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="strategies, policies, engines, workloads, models, metrics or faults."
        ),
    ],
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the names of one kind, what each is, and the options it takes."""
    if kind not in KINDS:
        raise UsageError(
            f"cannot list '{kind}'{did_you_mean(kind, KINDS)}", hint=f"known: {', '.join(KINDS)}"
        )
    entries = KINDS[kind]()
    if json_:
        typer.echo(json.dumps([_document(entry) for entry in entries], indent=2, ensure_ascii=False))
        return
    if not entries:
        typer.echo(f"no {kind} found", err=True)
    # Policies are written inside of a strategy: draft:k=4,policy=ema(warmup=20).
    before, after = ("(", ")") if kind == "policies" else (":", "")
    calls = [entry.name + (f"{before}{entry.options}{after}" if entry.options else "") for entry in entries]
    width = max(map(len, calls), default=0)
    group = None
    for call, entry in zip(calls, entries, strict=True):
        if entry.group != group:
            typer.echo(f"{'' if group is None else chr(10)}{entry.group}:")
            group = entry.group
        indent = "  " if group else ""
        typer.echo(f"{indent}{call:<{width}}  {entry.summary}".rstrip())


def _document(entry: Entry) -> dict[str, str]:
    """Return an entry as JSON, with its group as `class` if it has one."""
    shown = asdict(entry)
    group = shown.pop("group")
    return shown if group is None else {**shown, "class": group}


def _registered(kind: str) -> list[Entry]:
    folder = PACKAGE / registry.KINDS[kind]
    return [_described(name, folder / f"{name.replace('-', '_')}.py") for name in registry.names(kind)]


def _described(name: str, path: Path) -> Entry:
    """Read a module's first sentence and its `Options` from its text."""
    if not path.exists():  # from another package, through an entry point
        return Entry(name, "", "from another package")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    summary = (ast.get_docstring(tree) or "").split("\n\n")[0]
    return Entry(name, ",".join(_options(tree)), _line(summary), _constant(tree, "CLASS"))


def _constant(tree: ast.Module, name: str) -> str | None:
    """Return the text that a module gives a name, if it does."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return str(ast.literal_eval(node.value)) if node.value is not None else None
    return None


def _options(tree: ast.Module) -> Iterable[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Options":
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield f"{field.target.id.replace('_', '-')}={_default(field.value)}"


def _default(value: ast.expr | None) -> str:
    if value is None:
        return "…"
    text = str(value.value) if isinstance(value, ast.Constant) else ast.unparse(value)
    return text.lower() if text in ("True", "False", "None") else text


def _faults() -> list[Entry]:
    """List faults by class, in the order of the classes; those of other packages come last."""
    from specbench.audit.faults import FaultClass

    order = list(get_args(FaultClass))
    return sorted(
        _registered("fault"),
        key=lambda entry: order.index(entry.group) if entry.group in order else len(order),
    )


def _metrics() -> list[Entry]:
    from specbench.metrics.definitions import DEFINITIONS

    return [Entry(key, "", f"{one.label}: {one.formula}") for key, one in DEFINITIONS.items()]


def _models() -> list[Entry]:
    from specbench.models import aliases

    return [Entry(name, "", _line(summary)) for name, summary in aliases().items()]


def _workloads() -> list[Entry]:
    from specbench.workloads import available, load

    found = [load(name) for name in available()]
    return [Entry(w.name, "", f"{_line(w.description)} ({len(w.prompts)} prompts)") for w in found]


def _line(text: str) -> str:
    return " ".join(text.split())


KINDS: dict[str, Callable[[], list[Entry]]] = {
    "strategies": lambda: _registered("strategy"),
    "policies": lambda: _registered("policy"),
    "engines": lambda: _registered("engine"),
    "workloads": _workloads,
    "models": _models,
    "metrics": _metrics,
    "faults": _faults,
}
