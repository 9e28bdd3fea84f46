"""The layers of DESIGN.md: imports only point downwards, and light modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "specbench"

LAYERS = {
    "cli": 8,
    "__main__": 8,
    "testing": 8,
    "pytest_plugin": 8,
    "report": 7,
    "gate": 7,
    "doctor": 7,
    "bench": 6,
    "audit": 5,
    "engines": 4,
    "strategies": 3,
    "policies": 3,
    "runtime": 2,
    "models": 2,
    "decoding": 1,
    "metrics": 1,
    "economics": 1,
    "workloads": 1,
    "environment": 1,
    "records": 0,
    "stats": 0,
    "registry": 0,
    "errors": 0,
    "grammar": 0,
    "__init__": 0,
}

SIDEWAYS = {
    ("strategies", "policies"),
    ("policies", "strategies"),
    ("metrics", "economics"),  # a cell's summary holds its predicted speedup and what memory it takes
    ("__main__", "cli"),
    ("pytest_plugin", "testing"),
}
"""Arrows between different modules of one layer; all of layer 0 may use one another."""

HEAVY = {"torch", "transformers"}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(module: str) -> str:
    """Return the entry of the layer table that a module of specbench belongs to."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def module_of(path: Path) -> str:
    pieces = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(pieces[:-1] if pieces[-1] == "__init__" else pieces)


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield every module that is imported anywhere in a file, also where only types need it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            if base == "specbench":  # `from specbench import stats` names a module or a plain value
                yield from (f"specbench.{a.name}" if a.name in LAYERS else base for a in node.names)
            else:
                yield base


def package_of(path: Path) -> str:
    module = module_of(path)
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def arrows(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (part, imported part) for each import of specbench within specbench."""
    for name in imports(ast.parse(path.read_text(encoding="utf-8")), package_of(path)):
        if name.split(".")[0] == "specbench":
            yield part_of(module_of(path)), part_of(name)


def at_module_level(tree: ast.Module) -> ast.Module:
    """Leave out what does not run on import: functions, and imports that only types need."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                return [self.visit(child) for child in node.orelse]
            return self.generic_visit(node)

    stripped = Strip().visit(tree)
    assert isinstance(stripped, ast.Module)
    return stripped


def roots(tree: ast.Module, path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(tree, package_of(path))}


LIGHT = [
    path
    for path in FILES
    if (part := part_of(module_of(path))) != "decoding" and LAYERS.get(part) in (0, 1, 7, 8)
]


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_downwards(path: Path) -> None:
    """No module imports from a higher layer, or from another part of its own layer unless that is agreed."""
    for source, target in arrows(path):
        assert source in LAYERS, f"{module_of(path)}: give '{source}' a layer, here and in DESIGN.md"
        assert target in LAYERS, f"{module_of(path)}: give '{target}' a layer, here and in DESIGN.md"
        allowed = (
            source == target
            or LAYERS[target] < LAYERS[source]
            or LAYERS[target] == LAYERS[source] == 0
            or (source, target) in SIDEWAYS
        )
        assert allowed, (
            f"{module_of(path)} (layer {LAYERS[source]}) imports {target} (layer {LAYERS[target]})"
        )


@pytest.mark.parametrize("path", LIGHT, ids=module_of)
def test_light_layers_do_not_import_torch(path: Path) -> None:
    """Layers 0, 1 (but decoding), 7 and 8 import neither torch nor transformers at module level."""
    tree = at_module_level(ast.parse(path.read_text(encoding="utf-8")))
    assert not roots(tree, path) & HEAVY


@pytest.mark.parametrize("path", sorted((PACKAGE / "decoding").glob("*.py")), ids=module_of)
def test_decoding_depends_on_torch_alone(path: Path) -> None:
    """The package decoding imports torch, the standard library and layer 0, and nothing else."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    others = roots(tree, path) - set(sys.stdlib_module_names) - {"torch", "specbench"}
    assert not others
    parts = {target for _, target in arrows(path)}
    assert {part for part in parts if part != "decoding" and LAYERS[part] > 0} == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["list", "strategies"],
        ["list", "metrics"],
        ["explain", "ttft"],
        ["report", str(Path(__file__).parent / "golden" / "run")],
    ],
    ids=" ".join,
)
def test_commands_that_only_read_do_not_load_torch(arguments: list[str]) -> None:
    """`--help`, `list`, `explain` and `report` run in a process that never loads torch or transformers."""
    script = (
        "import sys; from specbench.cli import main; code = main(sys.argv[1:]); "
        f"loaded = {sorted(HEAVY)!r}; print([m for m in loaded if m in sys.modules], file=sys.stderr); "
        "sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip().endswith("[]"), result.stderr


def test_help_does_not_load_what_only_reports_need() -> None:
    """`--help` needs neither pyarrow nor numpy."""
    script = (
        "import sys; from specbench.cli import main; main(['--help']); "
        "sys.exit(' '.join(m for m in ('pyarrow', 'numpy', 'pandas', 'torch') if m in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stderr.strip() == ""


def test_an_upward_arrow_is_noticed() -> None:
    """The reader of imports sees plain, relative and typing-only imports."""
    source = (
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n"
        "import specbench.cli.report\nfrom specbench import audit\nfrom ..bench import store\n"
        "if TYPE_CHECKING:\n    from specbench.engines.base import Engine\n"
        "def f():\n    import specbench.report\n"
    )
    found = {part_of(n) for n in imports(ast.parse(source), "specbench.metrics") if n.startswith("specbench")}
    assert found == {"cli", "audit", "bench", "engines", "report"}
