"""Train the bundled pair: a deep, narrow target and a one-layer draft distilled from it.

    python tools/train_tiny.py --out specbench/models/tiny

One core, about an hour. Seeds are fixed and the number of steps does not depend on the clock unless
`--minutes` cuts it short, so the same Python, torch and machine give the same weights; another Python has
another standard library, and the model card says which one this was.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import tiny_corpus as corpus
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy, log_softmax, softmax
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 1024
CONTEXT = 2048
SEQUENCE = 512
BATCH = 12
# Cost follows depth at this width: twelve layers make one step of the draft a seventh of the target's.
LAYERS = 12
END = "<|end|>"
SHARE_OF_TASKS = 0.45


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of VOCAB entries; entry 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    # Single digits, so that numbers are copied digit by digit.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False
    )


def configuration(layers: int, width: int, heads: int, kv_heads: int) -> LlamaConfig:
    """Return a Llama configuration of the pair."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=int(width * 8 / 3) // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


class Batches:
    """An endless stream of `[BATCH, SEQUENCE + 1]` token windows: library text and whole tasks."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        texts = corpus.documents(held_out=False)
        self.blocks, self.prose = corpus.functions(texts), corpus.paragraphs(texts)
        encoded = tokenizer([text for _, text in texts])["input_ids"]
        self.library = torch.tensor([token for ids in encoded for token in [*ids, 0]])
        self.tokenizer = tokenizer
        self.random = torch.Generator().manual_seed(seed)
        self.tasks = corpus.task_stream(0, self.blocks, self.prose)
        self.rest: list[int] = []

    def task_window(self) -> torch.Tensor:
        """Return a window of tasks, one after another, each closed by the end token."""
        while len(self.rest) <= SEQUENCE:
            texts = [next(self.tasks) for _ in range(32)]
            for ids in self.tokenizer(texts)["input_ids"]:
                self.rest += [*ids, 0]
        window, self.rest = self.rest[: SEQUENCE + 1], self.rest[SEQUENCE:]
        return torch.tensor(window)

    def __next__(self) -> torch.Tensor:
        rows = []
        for _ in range(BATCH):
            if torch.rand((), generator=self.random) < SHARE_OF_TASKS:
                rows.append(self.task_window())
            else:
                start = int(torch.randint(len(self.library) - SEQUENCE - 1, (), generator=self.random))
                rows.append(self.library[start : start + SEQUENCE + 1])
        return torch.stack(rows)


def optimiser(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, steps: int) -> float:
    """Warm up over 100 steps, then follow a cosine to a twentieth."""
    if step < 100:
        return (step + 1) / 100
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - 100) / max(1, steps - 100))))


def train(
    student: LlamaForCausalLM,
    batches: Batches,
    *,
    steps: int,
    rate: float,
    teacher: LlamaForCausalLM | None = None,
    minutes: float = 1e9,
    name: str,
) -> float:
    """Train on the next token, or on the teacher's whole distribution; return the final mean loss."""
    optim = optimiser(student, rate)
    began, recent = time.time(), 0.0
    student.train()
    step = 0
    while step < steps:
        # Progress by whichever is further along, so that a run cut short still cools down.
        progress = max(step / steps, (time.time() - began) / 60 / minutes)
        if progress >= 1:
            break
        for group in optim.param_groups:
            group["lr"] = rate * learning_rate(step if step < 100 else int(progress * steps), steps)
        window = next(batches)
        inputs, targets = window[:, :-1], window[:, 1:]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = student(input_ids=inputs, use_cache=False).logits
            if teacher is not None:
                with torch.no_grad():
                    wanted = teacher(input_ids=inputs, use_cache=False).logits
        if teacher is None:
            loss = cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        else:
            p = softmax(wanted.float(), -1)
            loss = -(p * log_softmax(logits.float(), -1)).sum(-1).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optim.step()
        optim.zero_grad(set_to_none=True)
        recent = loss.item() if step == 0 else 0.98 * recent + 0.02 * loss.item()
        step += 1
        if step % 25 == 0:
            rate_now = step * BATCH * SEQUENCE / (time.time() - began)
            print(f"{name} step {step}/{steps} loss {recent:.3f} {rate_now:.0f} tokens/s", flush=True)
    student.eval()
    return recent


@torch.inference_mode()
def overlap(target: LlamaForCausalLM, draft: LlamaForCausalLM, texts: list[list[int]]) -> tuple[float, float]:
    """Return the target's loss and the mean acceptance sum_x min(p, q) at temperature 1 over texts."""
    losses, accepted = [], []
    for ids in texts:
        window = torch.tensor([ids[:SEQUENCE]])
        p, q = (softmax(m(input_ids=window, use_cache=False).logits[0].float(), -1) for m in (target, draft))
        losses.append(cross_entropy(p[:-1].log(), window[0, 1:]).item())
        accepted.append(torch.minimum(p, q).sum(-1).mean().item())
    return round(sum(losses) / len(losses), 3), round(sum(accepted) / len(accepted), 3)


def main() -> None:
    """Train, evaluate by kind of text, save both models and the facts for the model card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--draft-steps", type=int, default=700)
    parser.add_argument("--minutes", type=float, default=1e9, help="cut target training short")
    parser.add_argument("--draft-minutes", type=float, default=1e9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    library = corpus.documents(held_out=False)
    blocks, prose = corpus.functions(library), corpus.paragraphs(library)
    stream = corpus.task_stream(0, blocks, prose)
    tokenizer = train_tokenizer([text for _, text in library] + [next(stream) for _ in range(4000)])
    target = LlamaForCausalLM(configuration(layers=LAYERS, width=192, heads=6, kv_heads=2))
    draft = LlamaForCausalLM(configuration(layers=1, width=128, heads=4, kv_heads=2))
    began = time.time()
    loss = train(
        target, Batches(tokenizer, 1), steps=options.steps, rate=3e-3, minutes=options.minutes, name="target"
    )
    save(target, tokenizer, options.out / "target")
    draft_loss = train(
        draft,
        Batches(tokenizer, 2),
        steps=options.draft_steps,
        rate=4e-3,
        teacher=target,
        minutes=options.draft_minutes,
        name="draft",
    )
    save(draft, tokenizer, options.out / "draft")

    held = corpus.documents(held_out=True)
    kinds: dict[str, list[list[int]]] = {"library": []}
    for _, text in held:
        ids = tokenizer(text)["input_ids"]
        kinds["library"] += [ids[i : i + SEQUENCE] for i in range(0, min(len(ids), 6 * SEQUENCE), SEQUENCE)]
    seed = corpus.HELD_OUT_SEED
    while min(len(kinds.get(kind, [])) for kind in corpus.KINDS) < 20:
        kind, prompt, answer = corpus.task(seed, corpus.functions(held), corpus.paragraphs(held))
        kinds.setdefault(kind, []).append(tokenizer(prompt + answer)["input_ids"])
        seed += 1
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "library_sha256": corpus.digest(),
        "threads": options.threads,
        "minutes": round((time.time() - began) / 60, 1),
        "target": {"parameters": target.num_parameters(), "training_loss": round(loss, 3)},
        "draft": {"parameters": draft.num_parameters(), "distillation_loss": round(draft_loss, 3)},
        "held_out": {
            kind: dict(zip(("loss", "acceptance"), overlap(target, draft, texts), strict=True))
            for kind, texts in kinds.items()
        },
    }
    (options.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    (options.out / "README.md").write_text(card(facts))
    print(json.dumps(facts, indent=1))


def card(facts: dict[str, Any]) -> str:
    """Write the model card from what the training recorded."""
    target, draft = facts["target"], facts["draft"]
    rows = "".join(
        f"| {kind} | {figures['loss']:.2f} | {figures['acceptance']:.2f} |\n"
        for kind, figures in facts["held_out"].items()
    )
    return f"""# The bundled pair

A target of {target["parameters"]:,} parameters ({LAYERS} layers of width 192) and a draft of
{draft["parameters"]:,} (one layer of width 128) distilled from it, both Llama-type, float16, with one
byte-level BPE vocabulary of {VOCAB} tokens. They exist so that every part of specbench can run anywhere in
a minute, on models with real weights and real acceptance. They are good for nothing else.

- **Data**: the Python standard library's source and documentation (PSF-2.0), without tests and without
  the modules held out, and small tasks generated from it and from word lists of our own
  (`tools/tiny_corpus.py`). Python {facts["python"]}; SHA-256 of the library text:
  `{facts["library_sha256"]}`.
- **Training**: `tools/train_tiny.py`, {facts["minutes"]} minutes on {facts["threads"]} CPU thread(s),
  torch {facts["torch"]}. Final training loss {target["training_loss"]} nats a token; distillation
  cross-entropy {draft["distillation_loss"]}.
- **Licence**: Apache-2.0 for the weights; the data is PSF-2.0.

On text that was not trained on (acceptance: mean of sum over x of min(p, q) at temperature 1):

| kind of text | target loss (nats/token) | acceptance |
|---|---|---|
{rows}"""


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model in float16 safetensors with its tokenizer."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
