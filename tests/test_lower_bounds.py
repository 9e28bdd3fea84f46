"""The oldest releases that CI installs are those that pyproject.toml promises."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("lower_bounds")


def test_every_dependency_is_pinned(tool: ModuleType) -> None:
    """Each runtime dependency has a lower bound, and gets exactly that; torch can be left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = tool.promised(project)
    assert set(declared) == {*project["dependencies"], *project["optional-dependencies"]["plots"]}
    pinned = tool.lower_bounds(declared)
    assert [pin.replace("==", ">=") for pin in pinned] == declared
    assert [pin for pin in pinned if not pin.startswith("torch==")] == tool.lower_bounds(declared, ["torch"])


@pytest.mark.parametrize("requirement", ["numpy", "numpy>=1.26,<3", "numpy==1.26", "numpy>1"])
def test_what_has_no_lower_bound_is_refused(tool: ModuleType, requirement: str) -> None:
    """A requirement that promises something else would silently not be tested."""
    with pytest.raises(ValueError, match="not of the form"):
        tool.lower_bounds([requirement])


def test_only_what_is_required_can_be_left_out(tool: ModuleType) -> None:
    """A dependency that is gone from pyproject.toml must go from the call as well."""
    with pytest.raises(ValueError, match="no dependency 'torhc'"):
        tool.lower_bounds(["torch>=2.5"], ["torhc"])


def test_as_a_script(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints one constraint a line."""
    monkeypatch.setattr(sys, "argv", ["lower_bounds.py", "--except", "torch"])
    tool.main()
    lines = capsys.readouterr().out.splitlines()
    assert all("==" in line for line in lines)
    assert not any(line.startswith("torch=") for line in lines)
