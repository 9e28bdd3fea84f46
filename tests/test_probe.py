"""The load-time probe: what it accepts, what it refuses, and that it notices sabotage."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, build, uncached
from torch import Tensor, nn
from transformers import logging

import specbench
from specbench.engines.local import LocalEngine
from specbench.errors import ModelError
from specbench.runtime import attention
from specbench.runtime.cache import Placement, SlotCache
from specbench.runtime.probe import plain_twin, probe
from specbench.runtime.runner import ModelRunner


@pytest.mark.parametrize("family", FAMILIES)
def test_what_can_be_decoded_is_accepted(family: str) -> None:
    """Each family passes with rounding errors only, and is left with the attention that was reported."""
    model = build(family)
    found = probe(model)
    assert found.attention == ("eager" if family == "gemma2" else attention.NAME)
    assert model.config._attn_implementation == found.attention
    assert found.difference < 1e-4 < found.tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_can_be_probed_again(family: str) -> None:
    """A model that an engine has had before passes again, with the same attention, windows or not."""
    model = build(family)
    first, second = probe(model), probe(model)
    assert second.attention == first.attention
    assert second.difference < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_twin_gives_the_logits_of_transformers(family: str) -> None:
    """After the probe a twin of the same weights still gives the logits from before, beyond a window too."""
    model = build(family)
    text = [(5 * i) % 17 for i in range(20)]
    before = uncached(model, text)
    found = probe(model)
    twin = plain_twin(model)
    torch.testing.assert_close(uncached(twin, text), before, atol=0, rtol=0)
    assert model.config._attn_implementation == found.attention
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(own.data_ptr() == other.data_ptr() for own, other in pairs)


def test_bfloat16_is_accepted() -> None:
    """A bfloat16 model passes under a tolerance that allows for its rounding."""
    found = probe(build("llama").to(torch.bfloat16))
    assert found.difference < found.tolerance < 1


@pytest.mark.parametrize("family", ["mamba", "bloom", "falcon-alibi"])
def test_what_cannot_be_decoded_is_refused(family: str) -> None:
    """Recurrent state and alibi biases end in one line with a hint, the model's attention as before."""
    model = build(family)
    before = model.config._attn_implementation
    with pytest.raises(ModelError, match="cannot be decoded in process") as caught:
        probe(model)
    assert "\n" not in caught.value.message
    assert "real engine" in (caught.value.hint or "")
    assert model.config._attn_implementation == before


def test_the_engine_keeps_transformers_silent(caplog: pytest.LogCaptureFixture) -> None:
    """What transformers has to say while attentions are tried does not reach its log."""
    model = build("falcon-alibi")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_warning()
    try:
        with pytest.raises(ModelError, match="cannot be decoded in process"):
            LocalEngine(model, eos_ids=())
    finally:
        logging.set_verbosity(verbosity)
    assert [record.message for record in caplog.records] == []


def wrong_mask(monkeypatch: pytest.MonkeyPatch, change: int) -> None:
    """Let every query see `change` slots more."""
    original = ModelRunner._mask

    def mask(self: ModelRunner, positions: Tensor, *rest: Any) -> Any:
        return original(self, positions + change, *rest)

    monkeypatch.setattr(ModelRunner, "_mask", mask)


def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the sliding window, as a plain mask does."""
    original = ModelRunner._mask

    def mask(self: ModelRunner, *rest: Any) -> Any:
        self._window = None
        return original(self, *rest)

    monkeypatch.setattr(ModelRunner, "_mask", mask)


def wrong_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write rows to slots that are one too high."""
    original = SlotCache.place

    def place(self: SlotCache, at: Placement) -> None:
        slots = (at.slots + 1).clamp(max=self.width) if at.slots is not None else None
        original(self, dataclasses.replace(at, slots=slots))

    monkeypatch.setattr(SlotCache, "place", place)


def stale_positions(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Number tokens as if nothing had ever been rejected or held: positions begin at 0 each time."""
    original = model.forward

    @functools.wraps(original)
    def forward(*arguments: Any, **named: Any) -> Any:
        if named.get("position_ids") is not None:
            width = named["position_ids"].shape[1]
            named["position_ids"] = torch.arange(width).expand_as(named["position_ids"])
        return original(*arguments, **named)

    monkeypatch.setattr(model, "forward", forward)


@pytest.mark.parametrize(
    ("family", "sabotage"),
    [
        ("llama", lambda patch: wrong_mask(patch, 1)),
        ("llama", lambda patch: wrong_mask(patch, -1)),
        ("gpt2", lambda patch: wrong_mask(patch, 1)),
        ("gpt2", wrong_slots),
        ("llama", wrong_slots),
        ("mistral-window", no_window),
        ("qwen2-window", no_window),
        ("gemma2", no_window),
    ],
)
def test_a_broken_cache_is_noticed(
    family: str, sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks off by one, a window forgotten or slots off by one: refused, with how far the logits are off."""
    model = build(family)
    sabotage(monkeypatch)
    with pytest.raises(ModelError, match="logits off by"):
        probe(model)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "neox"])
def test_wrong_positions_are_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that do not follow what each row holds are noticed, learned or rotary."""
    model = build(family)
    stale_positions(model, monkeypatch)
    with pytest.raises(ModelError, match="logits off by"):
        probe(model)


def test_too_short_a_context_is_refused() -> None:
    """A context of 19 tokens leaves no room for the probe; the message says that it takes 20, and 20 do."""
    with pytest.raises(ModelError, match="context of 19 tokens is too short") as caught:
        probe(build("llama", max_position_embeddings=19))
    assert "at least 20 tokens" in (caught.value.hint or "")
    assert probe(build("llama", max_position_embeddings=20)).difference < 1e-4


@pytest.mark.parametrize("context", [20, 40, 64, 96])
@pytest.mark.parametrize("family", ["mistral-window", "qwen2-window"])
def test_a_window_does_not_shorten_what_is_accepted(family: str, context: int) -> None:
    """A window of 60 tokens is no reason to refuse a context that leaves room for the probe."""
    found = probe(build(family, sliding_window=60, max_position_embeddings=context))
    assert found.difference < found.tolerance


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    """If the decoder layers cannot be found, the error says so in one line."""
    model = build("llama")
    model.config.num_hidden_layers = 2
    with pytest.raises(ModelError, match="no list of 2 decoder layers"):
        probe(model)


class Renamed(nn.Module):
    """A model whose forward calls its cache by the one name or the other."""

    def __init__(self, inner: Any, name: str) -> None:
        super().__init__()
        self.inner, self.config, self.device, self.dtype = inner, inner.config, inner.device, inner.dtype
        self.get_input_embeddings = inner.get_input_embeddings
        self.get_output_embeddings = inner.get_output_embeddings
        self.given: list[Any] = []

        def forward(input_ids: Tensor, cache: Any = None, **named: Any) -> Any:
            self.given.append(cache)
            return inner(input_ids=input_ids, cache=cache, **named)

        def older(input_ids: Tensor, past_key_values: Any = None, **named: Any) -> Any:
            return forward(input_ids, past_key_values, **named)

        self.forward = forward if name == "cache" else older  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_both_names_of_the_cache_argument_work(name: str) -> None:
    """A forward that calls it `cache`, or `past_key_values` as before transformers 5.24, gets the cache."""
    model = build("llama")
    wrapped = Renamed(_under_new_name(model), name)
    runner = ModelRunner(wrapped, SlotCache(1, 8))
    logits = runner.forward(torch.tensor([[1, 2, 3]]), [0], [3]).logits[0]
    assert wrapped.given == [runner.cache]
    torch.testing.assert_close(logits, uncached(model, [1, 2, 3]), atol=1e-5, rtol=0)


def _under_new_name(model: Any) -> Any:
    """Return a callable that takes `cache` whatever the installed transformers calls it."""
    own = ModelRunner(model, SlotCache(1, 8))._cache_argument

    class Adapter(nn.Module):
        config, device, dtype = model.config, model.device, model.dtype
        get_input_embeddings = staticmethod(model.get_input_embeddings)
        get_output_embeddings = staticmethod(model.get_output_embeddings)

        def forward(self, cache: Any = None, **named: Any) -> Any:
            return model(**{own: cache}, **named)

    return Adapter()


def test_one_place_knows_the_name_of_the_cache_argument() -> None:
    """Of all files in the package only the runner names `past_key_values`, and the reference's own sampler.

    The reference shares no code with what it judges.
    """
    root = Path(specbench.__file__).parent
    naming = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Constant) and node.value == "past_key_values")
        or (isinstance(node, ast.keyword) and node.arg == "past_key_values")
    }
    assert naming == {"runtime/runner.py", "audit/plain_sampling.py"}
