"""Drafting token by token with a model: what `draft` and `early-exit` share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution
from specbench.decoding.padding import padded
from specbench.decoding.processing import SamplingTensors, process
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

    With `stop_below` a row ends after an unlikely token, and offers that token too: whether a position is
    drafted may depend on the tokens before it, never on its own. To look at a token and then drop it is
    biased: the target's own sample would take its place only where the draft drew something unlikely.
    Stopping reads one flag per row and depth from the device, so it is done only where asked for.

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
    limits = list(context.limits)
    drafts: list[Tensor] = []
    laws: list[Distribution] = []
    while (depth := len(drafts)) < max(limits):
        if depth:
            # Rows that want no more write to the trash slot; what they draft is not offered.
            wanted = [int(limit > depth) for limit in limits]
            logits = runner.forward(drafts[-1], held, wanted).logits
            held = [h + w for h, w in zip(held, wanted, strict=True)]
        law = process(logits[..., :vocab], sampling)
        laws.append(law)
        drafts.append(law.sample(uniform[:, depth : depth + 1]))
        if context.stop_below > 0 and depth + 1 < max(limits):
            confident = _probability(law, drafts[-1], logits[..., :vocab], sampling) >= context.stop_below
            limits = [
                limit if goes_on else min(limit, depth + 1)
                for limit, goes_on in zip(limits, confident.tolist(), strict=True)
            ]
    chain = torch.cat(drafts, 1).to(home)
    if laws[0].probs is None:
        return Proposal.chains(chain, limits, Distribution.point(chain))
    probs = torch.cat([law.to_dense(vocab) for law in laws], 1).to(home)
    if probs.shape[-1] < vocab:
        probs = torch.nn.functional.pad(probs, (0, vocab - probs.shape[-1]))
    return Proposal.chains(chain, limits, Distribution.dense(probs))


def _probability(law: Distribution, tokens: Tensor, logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return the probability of each row's token `[B]` under the law it was drawn from.

    At temperature 0 that law is certain and says nothing about the draft's doubt: there the softmax of the
    draft's logits stands in for it.
    """
    drawn = law.prob_of(tokens)
    if sampling.any_greedy:
        plain = Distribution.dense(logits.float().softmax(-1)).prob_of(tokens)
        drawn = torch.where(sampling.temperature[:, None] == 0, plain.to(drawn.dtype), drawn)
    return drawn.squeeze(1)
