"""Tiny random models of several families, and how tests decode with them.

Weights are scaled up so that attention and positions matter; greedy output does not settle on one token.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from specbench.metrics import identities
from specbench.records import (
    CellKey,
    CellRecords,
    Request,
    RequestRecord,
    RoundRecord,
    SamplingParams,
    Serving,
    StepRecord,
)
from specbench.runtime.events import Chunk, Event, Finished, Stepped

VOCAB = 17
CONTEXT = 96
WINDOW = 6

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2, "head_dim": 8}

_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": CONTEXT,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": False,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {k: v for k, v in _GROUPED.items() if k != "head_dim"}),
    "qwen2-window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            **{k: v for k, v in _GROUPED.items() if k != "head_dim"},
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _GROUPED),
    "mistral-window": ("MistralConfig", "MistralForCausalLM", {**_GROUPED, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **_GROUPED,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 8,
            "attn_implementation": "eager",
        },
    ),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _SHAPE),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": CONTEXT,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 1,
            "dropout": 0.0,
            "tie_word_embeddings": False,
        },
    ),
    # What the slot cache cannot decode.
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "state_size": 4,
            "attn_implementation": "eager",
            "num_hidden_layers": 2,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 4,
            "attn_implementation": "eager",
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-alibi": (
        "FalconConfig",
        "FalconForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "alibi": True,
            "new_decoder_architecture": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": False,
        },
    ),
}

FAMILIES = tuple(name for name in _FAMILIES if name not in ("mamba", "bloom", "falcon-alibi"))
"""Those that can be decoded."""


def build(
    family: str, *, seed: int = 9, gain: float = 6.0, head: float = 0.4, **changes: Any
) -> transformers.PreTrainedModel:
    """Return a new random model in evaluation mode.

    Args:
        family: a key of the table above.
        seed: of its weights.
        gain: by which the matrices are scaled after initialisation.
        head: standard deviation of the output head's weights.
        changes: of its configuration.
    """
    config_name, model_name, settings = _FAMILIES[family]
    settings = {**settings, **changes}
    attention = settings.pop("attn_implementation", "sdpa")
    config = getattr(transformers, config_name)(**settings)
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: transformers.PreTrainedModel = getattr(transformers, model_name)(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.data.mul_(gain)
            elif "embed" in name:
                parameter.data.normal_(0, 0.7)
        model.get_output_embeddings().weight.data.normal_(0, head)
    return model.eval().requires_grad_(False)


@functools.cache
def shared(family: str) -> transformers.PreTrainedModel:
    """Return the one model of a family that tests only read, its attention as transformers chose it."""
    return build(family)


def copied(model: transformers.PreTrainedModel, attention: str) -> transformers.PreTrainedModel:
    """Return a copy of a model under an attention implementation."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation(attention)
    return twin


@torch.inference_mode()
def uncached(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return the logits `[len, V]` of a plain forward without a cache."""
    logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


_greedy: dict[tuple[int, tuple[int, ...]], tuple[Any, list[int]]] = {}


def greedy(model: Any, prompt: Sequence[int], num: int) -> list[int]:
    """Return the next `num` tokens by the plainest greedy decoding: a whole forward for each.

    What was found is remembered, with the model, so that tests may ask often; models must not change.
    """
    _, tokens = _greedy.setdefault((id(model), tuple(prompt)), (model, list(prompt)))
    while len(tokens) < len(prompt) + num:
        tokens.append(int(uncached(model, tokens)[-1].argmax()))
    return tokens[len(prompt) : len(prompt) + num]


def perturbed(model: transformers.PreTrainedModel, amount: float, seed: int = 1) -> Any:
    """Return a copy with noise added to every matrix: a draft that is right more or less often."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in twin.parameters():
        if parameter.dim() > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(amount * float(parameter.std()) * noise)
    return twin


# Decoding


def requests(prompts: Iterable[Sequence[int]], *, arrivals: Sequence[float] = (), **sampling: Any) -> Any:
    """Return one request per prompt, seeds 100 onward, all with the same other parameters."""
    return tuple(
        Request(
            index,
            tuple(prompt),
            SamplingParams(**{"seed": 100 + index, **sampling}),
            f"prompt-{index}",
            arrivals[index] if arrivals else 0.0,
        )
        for index, prompt in enumerate(prompts)
    )


@dataclass(frozen=True)
class Served:
    """Everything one schedule left behind."""

    events: tuple[Event, ...]
    steps: tuple[StepRecord, ...]
    rounds: tuple[RoundRecord, ...]
    records: dict[int, RequestRecord]

    @property
    def outputs(self) -> list[list[int]]:
        """Return the output tokens in the order of the request ids."""
        return [list(self.records[key].output_tokens) for key in sorted(self.records)]

    @property
    def reasons(self) -> list[str]:
        """Return the finish reasons in the order of the request ids."""
        return [self.records[key].finish_reason for key in sorted(self.records)]


def collect(events: Iterable[Event]) -> Served:
    """Collect a schedule's events; fail if the records contradict one another or the chunks."""
    kept = tuple(events)
    steps = [event for event in kept if isinstance(event, Stepped)]
    rounds = tuple(entry for event in steps for entry in event.rounds)
    records = {event.record.request: event.record for event in kept if isinstance(event, Finished)}
    served = Served(kept, tuple(event.step for event in steps), rounds, records)
    chunks: dict[int, list[Chunk]] = {key: [] for key in records}
    for event in kept:
        if isinstance(event, Chunk):
            chunks[event.request].append(event)
    for key, record in records.items():
        assert record.output_tokens == tuple(token for chunk in chunks[key] for token in chunk.tokens)
        assert record.chunk_times == tuple(chunk.time for chunk in chunks[key])
        assert record.chunk_sizes == tuple(len(chunk.tokens) for chunk in chunks[key])
    finished = max((record.finished for record in records.values()), default=0.0)
    cell = CellKey("tiny", 0.0, "c=1", "any")
    serving = Serving(cell, 0, 0, served.steps, rounds, tuple(records.values()), finished)
    identities.enforce(CellRecords(cell, (serving,)))
    return served
