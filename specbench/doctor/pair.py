"""Whether two models load, decode in process and speak the same tokens, and the bytes their steps read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.doctor.bounds import CONTEXT
from specbench.doctor.findings import Finding
from specbench.errors import SpecbenchError

if TYPE_CHECKING:
    from specbench.models import LoadedModel, ResolvedModel

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model as loaded. `weights_read` is None where a step does not read all weights (experts)."""

    name: str
    dtype: str
    parameters: int
    weight_bytes: int
    weights_read: int | None
    kv_per_token: int
    kv_read: int
    context: int
    vocab_size: int
    max_context: int | None
    attention: str
    bytes_per_weight: int


def memory_problem(role: str, model: ResolvedModel, dtype: str, free: int | None) -> Finding | None:
    """Say that a model cannot fit, before the attempt ends this process."""
    from specbench.models.resolve import weight_files

    # The least it may take: the files may hold float32 that is loaded in half.
    stored = sum(path.stat().st_size for path in weight_files(model))
    least = stored // 2 if dtype in ("bfloat16", "float16") else stored
    if free is None or least <= free:
        return None
    message = f"{model.name} needs at least {least / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    return Finding(role, "problem", message, "use a smaller model, or a device with more memory")


def examine(
    role: str, model: ResolvedModel, dtype: str, device: str
) -> tuple[LoadedModel | None, ModelFacts | None, Finding]:
    """Load a model and try the slot cache on it."""
    from specbench import models
    from specbench.models.quiet import as_model_error

    try:
        with as_model_error(f"cannot load {model.name}"):
            loaded = models.load(model, dtype=dtype, device=device)
        with as_model_error(f"cannot decode {model.name}"):
            facts = _facts(loaded)
    except SpecbenchError as problem:
        return None, None, Finding(role, "problem", problem.message, problem.hint)
    context = "no stated limit of context" if facts.max_context is None else f"context {facts.max_context}"
    message = (
        f"{model.name}: {_count(facts.parameters)} parameters, {_size(facts.weight_bytes)} in {facts.dtype}, "
        f"{context}; decodes in process"
    )
    return loaded, facts, Finding(role, "ok", message)


def vocabulary_finding(target: LoadedModel, draft: LoadedModel) -> Finding:
    """Compare the two vocabularies token by token; other ids of the same tokens are mapped."""
    from specbench.models import fit_vocabulary

    try:
        ids = fit_vocabulary(
            target.tokenizer, draft.tokenizer, target_vocab=target.vocab_size, draft_vocab=draft.vocab_size
        )
    except SpecbenchError as problem:
        return Finding("vocabulary", "problem", problem.message, problem.hint)
    if ids is not None:
        shared = sum(index >= 0 for index in ids)
        message = (
            f"the draft's ids are not the target's: {shared} of its {draft.vocab_size} tokens are mapped by "
            f"their strings; the other {target.vocab_size - shared} of the target's {target.vocab_size} are "
            "never drafted, which costs acceptance and changes no output"
        )
        return Finding("vocabulary", "ok", message)
    sizes = str(target.vocab_size)
    if target.vocab_size != draft.vocab_size:
        sizes = f"{target.vocab_size} and {draft.vocab_size}"
    return Finding("vocabulary", "ok", f"the draft's tokens are the target's, id by id ({sizes} rows)")


def _facts(loaded: LoadedModel) -> ModelFacts:
    import torch

    from specbench.models.quiet import quiet
    from specbench.runtime.cache import SlotCache
    from specbench.runtime.probe import probe
    from specbench.runtime.runner import ModelRunner

    with quiet():
        probed = probe(loaded.model)
    cache = SlotCache(1, 8)
    ModelRunner(loaded.model, cache).forward(
        torch.zeros(1, 1, dtype=torch.int64, device=loaded.device), [0], [1]
    )
    context = min(CONTEXT, loaded.max_context or CONTEXT)
    return ModelFacts(
        name=loaded.name,
        dtype=loaded.dtype,
        parameters=loaded.parameters,
        weight_bytes=loaded.weight_bytes,
        weights_read=weights_read(loaded.model),
        kv_per_token=cache.bytes_per_token,
        kv_read=_kv_read(loaded.model, cache, context),
        context=context,
        vocab_size=loaded.vocab_size,
        max_context=loaded.max_context,
        attention=probed.attention,
        bytes_per_weight=loaded.model.dtype.itemsize,
    )


def weights_read(model: Any) -> int | None:
    """Return the bytes of weights that a step reads; None for a mixture of experts, which reads some.

    Of an embedding table it reads a row, unless the table is also the output head.
    """
    from torch import nn

    config = model.config.get_text_config(decoder=True)
    if any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS):
        return None
    head = model.get_output_embeddings()
    looked_up: set[Any] = {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding) and (head is None or module.weight is not head.weight)
    }
    read = (p for p in model.parameters() if p not in looked_up)
    return int(sum(p.numel() * p.element_size() for p in read))


def _kv_read(model: Any, cache: Any, context: int) -> int:
    """Return the bytes of K and V that a step reads, sliding windows considered."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or context
    total = 0
    for stored in (cache.keys, cache.values):
        for layer, tensor in stored.items():
            slides = kinds is None or kinds[layer] == "sliding_attention"
            seen = min(context, window) if slides else context
            total += seen * tensor.shape[1] * tensor.shape[3] * tensor.element_size()
    return total


def _count(number: int) -> str:
    for unit, word in ((1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.3g} {word}"
    return str(number)


def _size(size: int) -> str:
    for unit, word in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.3g} {word}"
    return f"{size} bytes"
