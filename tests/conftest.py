"""What every test shares: one thread, silent libraries, and tiny models."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_models
import torch
import transformers
from hypothesis import settings

from specbench import models

# Tiny models are too small to share among threads; on a busy machine that would cost seconds.
torch.set_num_threads(1)
# Its notes on missing kernels and attention switches are not warnings, and would only fill the report.
transformers.logging.set_verbosity_error()

# The same examples every time, so that a red test means a bug; `--hypothesis-profile=fresh` draws others.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.register_profile("fresh", deadline=None)
settings.load_profile("suite")

WORDS = ("<eos>", "<unk>", *"abcdefghijklmnopqrstuv")
"""The vocabulary of the saved model: a word per letter."""


@pytest.fixture(scope="session")
def plain() -> Callable[[str], Any]:
    """Return a family's model as transformers would run it; tests only read it."""
    return tiny_models.shared


@pytest.fixture(scope="session")
def slotted() -> Callable[[str], Any]:
    """Return a family's model, the same weights, under the attention that decodes it over slots."""
    kept: dict[str, Any] = {}

    def model(family: str) -> Any:
        if family not in kept:
            own = "eager" if family == "gemma2" else "specbench_slots"
            kept[family] = tiny_models.copied(tiny_models.shared(family), own)
        return kept[family]

    return model


def save(folder: Path, model: Any) -> Path:
    """Save a model with a word-level tokenizer whose words are letters."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    vocabulary = {word: index for index, word in enumerate(WORDS)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>"
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def _saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    model = tiny_models.build("llama", vocab_size=len(WORDS), eos_token_id=0, max_position_embeddings=128)
    save(folder / "target", model)
    save(folder / "draft", tiny_models.perturbed(model, 0.1))
    return folder


@pytest.fixture
def saved_model(_saved: Path, tmp_path: Path) -> Path:
    """Return a folder with `target`, a tiny Llama and its tokenizer, and `draft`, one that resembles it."""
    return Path(shutil.copytree(_saved, tmp_path / "models"))


class Pair(NamedTuple):
    """A target and its draft, loaded."""

    target: models.LoadedModel
    draft: models.LoadedModel


@pytest.fixture(scope="session")
def pair() -> Pair:
    """Return the bundled pair in float32: trained models with real acceptance; tests only read them."""
    return Pair(models.load("tiny", dtype="float32"), models.load("tiny-draft", dtype="float32"))
