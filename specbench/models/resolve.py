"""What a user may write to name a model, and where each kind of name leads."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specbench.errors import ModelError, did_you_mean
from specbench.models import smollm2
from specbench.models.quiet import as_model_error, one_line, quiet

Source = Literal["alias", "directory", "gguf", "hub"]

_BUNDLED = {"tiny": "target", "tiny-draft": "draft"}
_ALIASES = {
    "tiny": "the bundled target: 12 layers, trained on the Python standard library; no download",
    "tiny-draft": "the bundled draft: one layer, distilled from tiny; no download",
    "smollm2": smollm2.DESCRIPTION,
}

_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}

# `org/name`, with an optional `@revision`; deliberately without a host or a second slash.
_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?")

# A repository's own files at its top level; never pickles, never code.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Files on this machine that hold a model, and the name that led to them.

    `path` is a folder; `gguf_file` is the file in it that holds the weights, or None for safetensors.
    `revision` is the commit a hub model was read at, `sha256` the pinned hash of an alias's one file.
    """

    name: str
    path: str
    gguf_file: str | None
    revision: str | None
    sha256: str | None
    source: Source


def aliases() -> dict[str, str]:
    """Return the short names this package knows, each with a description."""
    return dict(_ALIASES)


def is_here(alias: str) -> bool:
    """Whether a short name can be loaded without a network."""
    return alias in _BUNDLED or (smollm2.cache_folder() / "model" / "model.safetensors").is_file()


def resolve(name: str, *, offline: bool = False, progress: bool | None = None) -> ResolvedModel:
    """Find the model called `name`, fetching it once if it is not on this machine yet.

    Args:
        name: an alias, a folder, a `.gguf` file, or a hub id `org/name[@revision]`. An alias wins over a
            folder of the same name (write `./smollm2` for the folder), an existing folder over a hub id.
        offline: fetch nothing; what is not here is an error.
        progress: False draws no progress; otherwise it is drawn on stderr if that is a terminal.

    Raises:
        ModelError: there is no such model, or it cannot be fetched or used here.
    """
    if name in _BUNDLED:
        inside = Path(__file__).resolve().parent / "tiny" / _BUNDLED[name]
        return ResolvedModel(name, str(inside), None, None, None, "alias")
    if name in _ALIASES:
        folder = smollm2.ensure(offline=offline, progress=progress)
        return ResolvedModel(name, str(folder), None, None, smollm2.GGUF_SHA256, "alias")
    path = Path(name).expanduser()
    if path.is_dir():
        resolved = ResolvedModel(name, str(path), None, None, None, "directory")
        weight_files(resolved)
        return resolved
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{name} is neither a folder nor a .gguf file")
        return ResolvedModel(name, str(path.parent), path.name, None, None, "gguf")
    hub = _HUB_ID.fullmatch(name)
    if hub and path.suffix.lower() != ".gguf":
        return _from_hub(name, hub["repo"], hub["revision"], offline=offline, progress=progress)
    if any(mark in name for mark in "/\\.") or name.startswith("~"):
        raise ModelError(
            f"no model at {name}",
            hint=f"name a folder, a .gguf file, a hub id org/name, or one of {', '.join(_ALIASES)}",
        )
    known = ", ".join(_ALIASES)
    raise ModelError(
        f"no model {name!r}{did_you_mean(name, _ALIASES)}",
        hint=f"name one of {known}, a folder, a .gguf file, or a hub id written org/name",
    )


def weight_files(resolved: ResolvedModel) -> list[Path]:
    """Return the files that hold the weights, or say why there are none that may be read."""
    folder, name = Path(resolved.path), resolved.name
    if resolved.gguf_file is not None:
        return [folder / resolved.gguf_file]
    if not folder.is_dir():
        raise ModelError(f"no model at {name}")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    ggufs = [path.name for path in files if path.suffix.lower() == ".gguf"]
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{name} holds no config.json, so it is not a model folder",
            hint=f"name the file in it: {name}/{ggufs[0]}" if ggufs else None,
        )
    with as_model_error(f"cannot read the config.json of {name}"):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ModelError(f"cannot read the config.json of {name}: it is not an object")
    if (folder / "adapter_config.json").is_file():
        raise ModelError(f"{name} holds an adapter", hint="merge it into its base model and save that")
    weights = [path for path in files if path.suffix == ".safetensors"]
    if weights:
        return weights
    if resolved.source == "hub" or any(path.suffix in _PICKLES for path in files):
        raise ModelError(
            f"{name} holds no safetensors; pickled weights are not read, because unpickling can run code",
            hint="convert them once, in a sandbox: load with transformers, then save_pretrained",
        )
    raise ModelError(f"{name} holds no weights: expected a .safetensors file beside config.json")


def _from_hub(
    name: str, repo: str, revision: str | None, *, offline: bool, progress: bool | None
) -> ResolvedModel:
    """Fetch a hub repository's safetensors, configuration and tokenizer into the hub's own cache."""
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import enable_progress_bars

    from specbench.models.progress import is_shown

    cause: Exception
    hint = None
    try:
        with quiet():
            if is_shown(progress):
                enable_progress_bars()
            folder = snapshot_download(
                repo,
                revision=revision,
                local_files_only=offline,
                allow_patterns=_HUB_FILES,
                ignore_patterns=["*/*"],
            )
    except errors.GatedRepoError as error:
        problem, cause = f"the model {repo} is gated", error
        hint = "accept its terms on its page, then log in with `hf auth login`"
    except errors.RevisionNotFoundError as error:
        problem, cause = f"the model {repo} has no revision {revision!r}", error
    except errors.RepositoryNotFoundError as error:
        problem, cause = f"no model {repo!r} on the hub, and no folder of that name here", error
        hint = "check the spelling; a private model needs `hf auth login`"
    except errors.LocalEntryNotFoundError as error:
        problem, cause = f"the model {repo} is not on this machine, and the hub cannot be reached", error
        hint = "fetch it once while online, or give the path of a folder that holds it"
        if offline:
            problem = f"the model {repo} is not on this machine, and fetching is switched off"
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        problem, cause = f"cannot fetch the model {repo}: {one_line(error)}", error
    else:
        resolved = ResolvedModel(name, folder, None, Path(folder).name, None, "hub")
        weight_files(resolved)
        return resolved
    raise ModelError(problem, hint=hint) from cause
