"""Drafting token by token with a model: what `draft` and `early-exit` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution
from specbench.decoding.padding import padded
from specbench.decoding.processing import SamplingTensors, process
from specbench.decoding.random_numbers import Purpose
from specbench.decoding.verification import Proposal
from specbench.runtime.grammar import DraftConstraint
from specbench.runtime.protocols import DraftContext
from specbench.runtime.runner import ModelRunner
from specbench.strategies._vocabulary import DraftVocabulary

Adjust = Callable[[Tensor, Tensor], Tensor]
"""Logits `[B, R, V]` and the place in the sequence that each row predicts `[B, R]`, to logits."""


def draft_chain(
    runner: ModelRunner,
    context: DraftContext,
    missing: Sequence[Sequence[int]],
    starts: Sequence[int],
    *,
    vocabulary: DraftVocabulary,
    home: torch.device,
    adjust: Adjust | None = None,
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
        vocabulary: the draft's tokens in the target's ids; what the draft lacks has q = 0.
        home: the target's device, where the proposal is wanted.
        adjust: changes the draft's logits, given the place of the token that each row predicts.
    """
    device, vocab = runner.device, vocabulary.target
    sampling = context.sampling.to(device)
    uniform = context.random.to(device).uniform(Purpose.DRAFT, max(context.limits))
    counts = [len(tokens) for tokens in missing]
    logits = runner.forward(
        padded(missing, device), starts, counts, keep=[count - 1 for count in counts]
    ).logits
    held = [start + count for start, count in zip(starts, counts, strict=True)]
    limits = list(context.limits)
    constraint = context.constraint()
    drafts: list[Tensor] = []
    laws: list[Distribution] = []
    while (depth := len(drafts)) < max(limits):
        if depth:
            # Rows that want no more write to the trash slot; what they draft is not offered.
            wanted = [int(limit > depth) for limit in limits]
            logits = runner.forward(vocabulary.read_drafts(drafts[-1]), held, wanted).logits
            held = [h + w for h, w in zip(held, wanted, strict=True)]
        scores = vocabulary.logits(logits)
        if adjust is not None:
            scores = adjust(scores, torch.tensor(held, device=device)[:, None])
        allowed = None
        if constraint is not None:
            if depth:
                tokens = drafts[-1].squeeze(1).tolist()
                constraint.advance(
                    [t if limit > depth else None for t, limit in zip(tokens, limits, strict=True)]
                )
            allowed, limits = _within(constraint, scores, limits, depth)
        drafted = torch.cat(drafts, 1) if drafts else torch.zeros_like(uniform[:, :0], dtype=torch.int64)
        followed = torch.ones(len(counts), 1, depth, dtype=torch.bool, device=device)
        law = process(scores, sampling, context.history(drafted, followed), allowed)
        laws.append(law)
        drafts.append(law.sample(uniform[:, depth : depth + 1]))
        if context.stop_below > 0 and depth + 1 < max(limits):
            confident = _probability(law, drafts[-1], scores, sampling) >= context.stop_below
            limits = [
                limit if goes_on else min(limit, depth + 1)
                for limit, goes_on in zip(limits, confident.tolist(), strict=True)
            ]
    if constraint is not None:
        constraint.restore()
    chain = torch.cat(drafts, 1).to(home)
    if laws[0].probs is None:
        return Proposal.chains(chain, limits, Distribution.point(chain))
    probs = torch.cat([law.to_dense(vocab) for law in laws], 1).to(home)
    if probs.shape[-1] < vocab:
        probs = torch.nn.functional.pad(probs, (0, vocab - probs.shape[-1]))
    return Proposal.chains(chain, limits, Distribution.dense(probs))


def _within(
    constraint: DraftConstraint, scores: Tensor, limits: list[int], depth: int
) -> tuple[Tensor, list[int]]:
    """Return what each row may draft next, `[B, 1, V']`; a row for which the draft has no token ends here."""
    allowed = constraint.masks()[:, : scores.shape[-1]].to(scores.device)
    possible = (allowed & (scores[:, 0] > -torch.inf)).any(-1)
    ends = [
        limit if there_is else min(limit, depth)
        for limit, there_is in zip(limits, possible.tolist(), strict=True)
    ]
    return (allowed | ~possible[:, None])[:, None], ends


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
