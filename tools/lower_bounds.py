"""Print pip constraints that pin every dependency of pyproject.toml, optional ones too, to its lower bound.

    python tools/lower_bounds.py --except torch >constraints.txt

What only the tests need is left alone: it is no promise to users. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
_BOUND = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*>=\s*(?P<version>[0-9][0-9A-Za-z.]*)")


def promised(project: dict[str, Any]) -> list[str]:
    """Return what users are told to install: the dependencies and those of every extra but `dev`."""
    extras = project.get("optional-dependencies", {})
    optional = [requirement for name, listed in extras.items() if name != "dev" for requirement in listed]
    return [*project["dependencies"], *optional]


def lower_bounds(requirements: Sequence[str], left_out: Sequence[str] = ()) -> list[str]:
    """Return `name==version` for each requirement `name>=version`.

    Raises:
        ValueError: a requirement has another form, so that it has no lower bound to test; or a name of
            `left_out` is none of theirs.
    """
    bounds: dict[str, str] = {}
    for requirement in requirements:
        match = _BOUND.fullmatch(requirement.strip())
        if match is None:
            raise ValueError(f"'{requirement}' is not of the form name>=version")
        bounds[match["name"]] = match["version"]
    unknown = set(left_out) - set(bounds)
    if unknown:
        raise ValueError(f"no dependency '{min(unknown)}'; there are {', '.join(bounds)}")
    return [f"{name}=={version}" for name, version in bounds.items() if name not in left_out]


def main() -> None:
    """Read pyproject.toml and print the constraints, one a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--except", dest="left_out", action="append", default=[], metavar="NAME")
    arguments = parser.parse_args()
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    try:
        constraints = lower_bounds(promised(project), arguments.left_out)
    except ValueError as problem:
        parser.error(str(problem))
    print("\n".join(constraints))


if __name__ == "__main__":
    main()
