"""What is installed: the versions our requirements ask for, and the models and engines that may be named."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbench import registry
from specbench.doctor.findings import Finding

_DISTRIBUTION = "specbench-llm"

ENGINE_PACKAGES = {
    "local": "torch",
    "transformers": "transformers",
    "vllm": "vllm",
    "sglang": "sglang",
    "llama-cpp": "llama_cpp",
    "openvino": "openvino_genai",
    "onnxruntime": "onnxruntime_genai",
}
"""The package each engine imports; an engine that is not listed needs none."""

_LOOKED_FOR = ("vllm", "sglang", "llama-cpp", "openvino")


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine: whether this specbench can drive it, and whether its package (None: needs none) is here."""

    name: str
    known: bool
    package: str | None
    installed: bool


@dataclass(frozen=True, slots=True)
class ModelState:
    """An alias; `cached` is None where that cannot be told without fetching."""

    name: str
    summary: str
    cached: bool | None


# -- versions -----------------------------------------------------------------------------------------


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def stated_requirements() -> tuple[str | None, list[str]] | None:
    """Return what specbench asks for, of Python and of packages; None if it is not installed."""
    try:
        metadata = importlib.metadata.metadata(_DISTRIBUTION)
        python = (metadata.get_all("Requires-Python") or [None])[0]
        return python, importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None


def check_requirements(
    stated: tuple[str | None, Sequence[str]] | None,
    *,
    version_of: Callable[[str], str | None] = installed_version,
    python: str | None = None,
) -> list[Finding]:
    """Compare what is installed with what is required: one finding for each that is missing or too old."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    if stated is None:
        remedy = "install it, from a checkout with `pip install --editable .`"
        return [
            Finding("requirements", "warning", "not checked: specbench is not installed as a package", remedy)
        ]
    requires_python, texts = stated
    python = python or platform.python_version()
    findings = []
    if requires_python and not SpecifierSet(requires_python).contains(python, prereleases=True):
        message = f"python {python} is installed, {requires_python} is required"
        findings.append(Finding("requirements", "problem", message, "use a Python within that range"))
    requirements = [Requirement(text) for text in texts]
    needed = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    for requirement in needed:
        version = version_of(requirement.name)
        bound = str(requirement.specifier) or "any version"
        if version is None:
            message = f"{requirement.name} is not installed, {bound} is required"
        elif not requirement.specifier.contains(version, prereleases=True):
            message = f"{requirement.name} {version} is installed, {bound} is required"
        else:
            continue
        remedy = f'pip install "{requirement.name}{requirement.specifier}"'
        findings.append(Finding("requirements", "problem", message, remedy))
    return findings or [Finding("requirements", "ok", f"all {len(needed)} required packages are as required")]


# -- models and engines -------------------------------------------------------------------------------


def model_states() -> list[ModelState]:
    """List the aliases; nothing is fetched and nothing is written."""
    from specbench.models import aliases, is_here

    return [ModelState(name, " ".join(text.split()), is_here(name)) for name, text in aliases().items()]


def engine_states(importable: Callable[[str], bool] | None = None) -> list[EngineState]:
    """List the engines that may be named, and known ones whose adapter this version lacks."""
    importable = importable or _importable
    known = registry.names("engine")
    states = []
    for name in [*known, *(name for name in _LOOKED_FOR if name not in known)]:
        package = ENGINE_PACKAGES.get(name)
        states.append(EngineState(name, name in known, package, package is None or importable(package)))
    return states


def models_finding(states: Sequence[ModelState]) -> Finding:
    """Say which aliases are on this machine."""
    words = {True: "on this machine", False: "not fetched yet", None: "unknown whether fetched"}
    return Finding("models", "ok", "; ".join(f"{s.name} ({words[s.cached]})" for s in states) or "no aliases")


def engines_finding(states: Sequence[EngineState]) -> Finding:
    """Say which engines can be used, and which could be after an installation."""
    parts = {
        "": [s.name for s in states if s.known and s.installed],
        "not installed: ": [s.name for s in states if not s.installed],
        "installed, but this specbench has no adapter: ": [
            s.name for s in states if s.installed and not s.known
        ],
    }
    return Finding(
        "engines", "ok", "; ".join(word + ", ".join(names) for word, names in parts.items() if names)
    )


def _importable(package: str) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    # A folder of that name in the working directory is found too, but has no origin.
    return spec is not None and spec.origin is not None
