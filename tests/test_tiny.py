"""The bundled pair: small, compatible, faster to draft with than to decode, and really trained."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from conftest import Pair

from specbench import models, workloads
from specbench.audit.reference import Oracle
from specbench.records import SamplingParams

FOLDER = Path(models.__file__).parent / "tiny"


def test_size() -> None:
    """Both models together weigh less than 12 MB, in safetensors alone."""
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 12_000_000
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".md", ".jinja"}


def test_pair_fits(pair: Pair) -> None:
    """The draft has the target's tokens, and one layer."""
    target, draft = pair
    models.check_vocabulary(
        target.tokenizer, draft.tokenizer, target_vocab=target.vocab_size, draft_vocab=draft.vocab_size
    )
    assert draft.num_layers == 1
    assert target.num_layers >= 8
    assert target.eos_token_ids == draft.eos_token_ids


def test_card() -> None:
    """The model card states data, licence, loss and acceptance as the training run recorded them."""
    facts = json.loads((FOLDER / "training.json").read_text())
    card = (FOLDER / "README.md").read_text()
    assert "PSF-2.0" in card
    assert facts["library_sha256"] in card
    for kind, figures in facts["held_out"].items():
        assert f"| {kind} | {figures['loss']:.2f} | {figures['acceptance']:.2f} |" in card


def test_it_has_learned(pair: Pair) -> None:
    """The target predicts the tasks far better than chance: a copied text costs little surprise."""
    target = pair.target
    prompts = [p for p in workloads.load("tiny-predictable").prompts if p.category == "to-list"][:4]
    oracle = Oracle(target.model, SamplingParams())
    bits = []
    for prompt in prompts:
        text = prompt.plain
        listed = text.split("\n", 1)[1].split("\n# Answer")[0]
        answer = (
            ", ".join(line[2:] for line in listed.splitlines())
            if listed.startswith("- ")
            else "\n".join(f"- {item}" for item in listed.split(", "))
        )
        ids = target.tokenizer(text + answer)["input_ids"]
        start = len(target.tokenizer(text)["input_ids"])
        laws = oracle.next_distributions([ids[:i] for i in range(start, len(ids))])
        chosen = laws.gather(1, torch.tensor(ids[start:])[:, None])
        bits.append(float(-chosen.log2().mean()))
    assert max(bits) < 2.5  # ten bits would be a guess among all tokens
