"""How files become a model ready to decode, and the facts about it that the rest of specbench may rely on."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.errors import ModelError, did_you_mean
from specbench.models.fingerprint import fingerprint_files
from specbench.models.quiet import as_model_error, quiet
from specbench.models.resolve import ResolvedModel, resolve, weight_files

if TYPE_CHECKING:
    import torch

_DTYPES = ("auto", "bfloat16", "float16", "float32")

# The two the engine builds masks for. transformers would take any name here and fetch a kernel for it.
_ATTENTIONS = ("auto", "eager", "sdpa")

# What configurations call the longest input; alibi and recurrent models have none of these.
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")


@dataclass(slots=True)
class LoadedModel:
    """A causal language model in evaluation mode, its tokenizer, and what is known about both.

    `vocab_size` counts the rows of the output head, which may exceed the tokenizer's tokens. `max_context`
    is None where the model states no limit. `parameters` and `weight_bytes` count tied weights once.
    `fingerprint` tells weights apart: the pinned hash for an alias, else `fingerprint_files` over the
    configuration and weight files. It does not cover `dtype`, which is recorded beside it.
    """

    resolved: ResolvedModel
    model: Any
    tokenizer: Any
    dtype: str
    device: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_context: int | None
    num_layers: int
    parameters: int
    weight_bytes: int
    fingerprint: str

    @property
    def name(self) -> str:
        """The name as the user wrote it."""
        return self.resolved.name


def load(
    model: ResolvedModel | str, *, dtype: str = "auto", device: str = "cpu", attention: str = "auto"
) -> LoadedModel:
    """Load a model and its tokenizer, without code from the checkpoint and without unpickling anything.

    Args:
        model: what `resolve` returned, or a name for it.
        dtype: `float32`, `bfloat16`, `float16`, or `auto` for the checkpoint's own.
        device: `cpu`, `cuda`, `cuda:1`, …
        attention: `sdpa`, `eager`, or `auto` for sdpa where the model has it and eager elsewhere.

    Raises:
        ModelError: an argument is unknown or unavailable, or the files cannot be read as a causal model.
    """
    require_dtype(dtype)
    if attention not in _ATTENTIONS:
        raise ModelError(
            f"no attention {attention!r}{did_you_mean(attention, _ATTENTIONS)}",
            hint="use auto, sdpa or eager",
        )
    place = require_device(device)
    resolved = resolve(model) if isinstance(model, str) else model
    folder = Path(resolved.path)
    weights = weight_files(resolved)

    import torch

    torch_dtype = "auto" if dtype == "auto" else getattr(torch, dtype)
    with quiet(), as_model_error(f"cannot load the model {resolved.name}"):
        network = _load_network(resolved, folder, torch_dtype, attention)
        network = network.to(place).eval().requires_grad_(False)
    with quiet(), as_model_error(f"cannot load the tokenizer of {resolved.name}"):
        tokenizer = load_tokenizer(folder, resolved.gguf_file)

    config = network.config.get_text_config()
    head = network.get_output_embeddings()
    unique = list(network.parameters())
    # Some transformers versions invent special tokens for a GGUF's tokenizer; its configuration is right.
    stated = _eos_token_ids(network.generation_config, network.config, config)
    if resolved.gguf_file is None or not stated:
        stated = _eos_token_ids(network.generation_config, network.config, config, tokenizer)
    configuration = [] if resolved.gguf_file is not None else [folder / "config.json"]
    return LoadedModel(
        resolved=resolved,
        model=network,
        tokenizer=tokenizer,
        dtype=str(network.dtype).removeprefix("torch."),
        device=str(place),
        eos_token_ids=stated,
        vocab_size=config.vocab_size if head is None else head.weight.shape[0],
        max_context=_max_context(config),
        num_layers=config.num_hidden_layers,
        parameters=sum(parameter.numel() for parameter in unique),
        weight_bytes=sum(parameter.numel() * parameter.element_size() for parameter in unique),
        fingerprint=resolved.sha256 or fingerprint_files([*configuration, *weights]),
    )


def _load_network(resolved: ResolvedModel, folder: Path, dtype: Any, attention: str) -> Any:
    """Load the network under the attention asked for."""
    wanted = "sdpa" if attention == "auto" else attention
    try:
        if resolved.gguf_file is not None:
            return load_gguf(folder, resolved.gguf_file, dtype=dtype, attention=wanted)
        return _load_safetensors(folder, dtype=dtype, attention=wanted)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        if attention == "auto":
            return _load_network(resolved, folder, dtype, "eager")
        raise ModelError(
            f"the model {resolved.name} has no sdpa attention", hint="load it as eager"
        ) from error


def load_gguf(folder: Path, file: str, *, dtype: Any, attention: str = "sdpa") -> Any:
    """Load a GGUF with every weight dequantised; `dtype` is torch's or `auto`."""
    import importlib.util

    import transformers

    if importlib.util.find_spec("accelerate") is None:
        raise ModelError("reading a GGUF file needs the package accelerate", hint="pip install accelerate")
    options = {}
    if hasattr(transformers, "GgufConfig"):
        # Otherwise an installed `kernels` package would keep the weights packed and fetch its own matmul
        # and attention: other numbers, depending on what happens to be installed.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # Its reader draws a bar that transformers' own switch does not reach.
    with contextlib.redirect_stderr(io.StringIO()):
        network, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder),
            gguf_file=file,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    _check_complete(info)
    return network


def load_tokenizer(folder: Path, gguf_file: str | None = None) -> Any:
    """Load a folder's tokenizer, or what transformers makes of the one inside a GGUF file.

    A GGUF names its rule for splitting words, and transformers does not know all of them: text may then
    be cut into other tokens than the model was trained on. The tokens are the same for every strategy.
    """
    from transformers import AutoTokenizer

    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    return AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False, **options
    )


def _load_safetensors(folder: Path, *, dtype: Any, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    network, info = AutoModelForCausalLM.from_pretrained(
        str(folder),
        dtype=dtype,
        attn_implementation=attention,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    _check_complete(info)
    return network


def _check_complete(info: Mapping[str, Any]) -> None:
    """Refuse a model whose weights are partly missing: transformers would fill them with random numbers."""
    for problem in ("missing_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in info.get(problem) or ())
        if keys:
            raise ValueError(f"{len(keys)} of its weights are {problem.split('_')[0]}, first {keys[0]}")


def require_dtype(dtype: str, option: str = "--dtype") -> None:
    """Refuse a dtype that no model can be loaded in; the hint names the option it was given by."""
    if dtype not in _DTYPES:
        raise ModelError(
            f"no dtype {dtype!r}{did_you_mean(dtype, _DTYPES)}", hint=f"{option} takes {', '.join(_DTYPES)}"
        )


def require_device(device: str, option: str = "--device") -> torch.device:
    """Return the device if this machine has it; where not, the hint names the option it was given by.

    Raises:
        ModelError: there is no such device, or none that holds a model.
    """
    import torch

    kinds = f"{option} takes cpu, cuda, cuda:1, …"
    instead = f"use {option} cpu"

    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"no device {device!r}", hint=kinds) from error
    if place.type == "cuda":
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (place.index or 0) >= devices:
            found = f"{devices} found" if devices else "this torch sees no CUDA device"
            raise ModelError(f"device {device!r} is not available: {found}", hint=instead)
    elif place.type == "mps":
        if not torch.backends.mps.is_available():
            raise ModelError(f"device {device!r} is not available here", hint=instead)
    elif place.type != "cpu":
        raise ModelError(f"device {device!r} cannot hold a model here", hint=kinds)
    return place


def _eos_token_ids(*sources: Any) -> tuple[int, ...]:
    """Collect the ids that end a text, wherever they are stated: each as a number, a list, or not at all."""
    found: set[int] = set()
    for source in sources:
        stated = getattr(source, "eos_token_id", None)
        if isinstance(stated, int):
            found.add(stated)
        elif stated is not None:
            found.update(int(index) for index in stated)
    return tuple(sorted(found))


def _max_context(config: Any) -> int | None:
    """Return the longest context the configuration states, or None."""
    for name in _CONTEXT_NAMES:
        stated = getattr(config, name, None)
        if isinstance(stated, int) and stated > 0:
            return stated
    return None
