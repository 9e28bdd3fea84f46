"""The README tells the truth: its commands exist, its table is the stored one, nothing is missing."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from specbench import registry, testing
from specbench.cli import app

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


def test_table_is_the_stored_one() -> None:
    """The table of the README is what the published run folder renders to."""
    script = [sys.executable, str(ROOT / "tools" / "readme_table.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
