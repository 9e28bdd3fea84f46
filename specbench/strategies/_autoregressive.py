"""Drafting token by token with a model: what `draft` and `early-exit` share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution
from specbench.decoding.padding import padded
from specbench.decoding.processing import process
from specbench.decoding.random_numbers import Purpose
from specbench.decoding.verification import Proposal
from specbench.runtime.protocols import DraftContext
from specbench.runtime.runner import ModelRunner


def draft_chain(
    runner: ModelRunner,
    context: DraftContext,
    missing: Sequence[Sequence[int]],
    starts: Sequence[int],
    *,
    vocab: int,
    home: torch.device,
) -> Proposal:
    """Draft up to `limits[b]` tokens per row, each from the processed law of the ones before it.

    Args:
        runner: the draft.
        context: see `DraftContext`; the same sampling as the target's, so that q is the law drawn from.
        missing: committed tokens that each row's draft cache lacks, at least one: the last.
        starts: slots each row already holds.
        vocab: the target's vocabulary; ids beyond it are never drafted, ids the draft lacks have q = 0.
        home: the target's device, where the proposal is wanted.
    """
    device = runner.device
    sampling = context.sampling.to(device)
    uniform = context.random.to(device).uniform(Purpose.DRAFT, max(context.limits))
    counts = [len(tokens) for tokens in missing]
    logits = runner.forward(
        padded(missing, device), starts, counts, keep=[count - 1 for count in counts]
    ).logits
    held = [start + count for start, count in zip(starts, counts, strict=True)]
    drafts: list[Tensor] = []
    laws: list[Distribution] = []
    for depth in range(max(context.limits)):
        if depth:
            # Rows that want no more write to the trash slot; what they draft is not offered.
            wanted = [int(limit > depth) for limit in context.limits]
            logits = runner.forward(drafts[-1], held, wanted).logits
            held = [h + w for h, w in zip(held, wanted, strict=True)]
        drafted = torch.cat(drafts, 1) if drafts else torch.zeros_like(uniform[:, :0], dtype=torch.int64)
        followed = torch.ones(len(counts), 1, depth, dtype=torch.bool, device=device)
        law = process(logits[..., :vocab], sampling, context.history(drafted, followed))
        laws.append(law)
        drafts.append(law.sample(uniform[:, depth : depth + 1]))
    chain = torch.cat(drafts, 1).to(home)
    if laws[0].probs is None:
        return Proposal.chains(chain, context.limits, Distribution.point(chain))
    probs = torch.cat([law.to_dense(vocab) for law in laws], 1).to(home)
    if probs.shape[-1] < vocab:
        probs = torch.nn.functional.pad(probs, (0, vocab - probs.shape[-1]))
    return Proposal.chains(chain, context.limits, Distribution.dense(probs))
