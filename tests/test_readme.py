"""The README tells the truth: its commands exist, its table is the stored one, nothing is missing."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import typer

from specbench import registry, testing
from specbench.cli import app
from specbench.decoding.verification import RULES
from specbench.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
COMMANDS = typer.main.get_command(app)


def command_lines() -> list[list[str]]:
    """Return every `specbench` command line of the README's code blocks, in words."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("specbench ")]


@pytest.mark.parametrize("words", command_lines(), ids=" ".join)
def test_command_exists(words: list[str]) -> None:
    """Every command of the README exists and has the options it is shown with."""
    name, *rest = words[1:]
    command = COMMANDS.commands[name]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= known


def test_commands_are_documented() -> None:
    """Every command is in the README."""
    shown = {words[1] for words in command_lines()}
    assert set(COMMANDS.commands) <= shown  # type: ignore[attr-defined]


def test_commands_are_smoked() -> None:
    """CI runs every command of the README."""
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    smoked = {line.split()[1] for line in script.splitlines() if line.startswith('"$bin" ')}
    assert {words[1] for words in command_lines()} <= smoked


def test_audit_example_is_a_valid_call() -> None:
    """The test that the README shows calls the fixture with arguments that the audit has."""
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    (call,) = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "lossless"]
    keywords = {str(keyword.arg): None for keyword in call.keywords}
    bound = inspect.signature(testing.audit).bind(*call.args, **keywords)
    assert list(bound.arguments)[:5] == ["generate", "target", "tokenizer", "prompts", "sampling"]


def test_strategies_are_documented() -> None:
    """Every strategy has its row, with all of its options."""
    for name in registry.names("strategy"):
        row = next(line for line in README.splitlines() if line.startswith(f"| `{name}`"))
        for option in registry.module("strategy", name).Options.__dataclass_fields__:
            assert f"`{option}`" in row, (name, option)


TREES = {"topk": "topk=2,nodes=4", "nodes": "nodes=4"}
"""How a tree is asked for, by the option that a strategy with trees has."""


def supported(name: str) -> dict[str, str]:
    """Return the row of the table of what goes with what, from the strategy's own options."""
    fields = registry.module("strategy", name).Options.__dataclass_fields__
    trees = next((text for option, text in TREES.items() if option in fields), None)

    def takes(*options: str) -> bool:
        try:
            registry.options("strategy", registry.parse(f"{name}:{','.join(options)}"))
        except UsageError:
            return False
        return True

    def listed(option: str, values: Iterable[str], *shape: str) -> str:
        if option not in fields:
            return "–"
        found = [value for value in values if takes(*shape, f"{option}={value}")]
        return " ".join(f"`{v}`" + (r"\*" if v in RULES and not RULES[v].lossless else "") for v in found)

    rules, policies = list(RULES), registry.names("policy")
    return {
        "strategy": f"`{name}`",
        "`verify`, chains": listed("verify", rules),
        "`verify`, trees": listed("verify", rules, trees) if trees else "–",
        "policies, chains": listed("policy", policies),
        "policies, trees": listed("policy", policies, trees) if trees else "–",
        # The step loop applies them to every window; `test_grammar_decoding` tries every strategy.
        "grammars, penalties": "yes",
    }


def test_what_goes_with_what() -> None:
    """The table holds a row per strategy, and it says which rules and policies its options take."""
    _, _, table = README.partition("What goes with what")
    lines = [line for line in table.splitlines() if line.startswith("|")]
    header, _, *rows = lines[: 2 + len(registry.names("strategy"))]
    names = [cell.strip() for cell in header.strip("|").split("|")]
    found = [dict(zip(names, (c.strip() for c in row.strip("|").split("|")), strict=True)) for row in rows]
    assert {row["strategy"] for row in found} == {f"`{name}`" for name in registry.names("strategy")}
    for row in found:
        assert row == supported(row["strategy"].strip("`"))


def test_table_is_the_stored_one() -> None:
    """The table of the README is what the published run folder renders to."""
    script = [sys.executable, str(ROOT / "tools" / "readme_table.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
