"""Drafting a tree with a model: several candidates for a place, drawn without replacement.

The shape is fixed before anything is drawn. A tree that grew where the draft turned out confident would
depend on the tokens drawn, and pruning a sampled node after a look at its probability biases the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution
from specbench.decoding.padding import padded
from specbench.decoding.processing import ancestors, process
from specbench.decoding.random_numbers import Purpose
from specbench.decoding.verification import Proposal
from specbench.runtime.grammar import unpack, window_masks
from specbench.runtime.protocols import DraftContext
from specbench.runtime.runner import ModelRunner, TreeWindow
from specbench.strategies._autoregressive import Adjust
from specbench.strategies._vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree of fixed shape, its nodes level by level.

    `parents[i]` is node i's parent, -1 at the top; `ranks[i]` its place among its siblings; `depths[i]`
    counts from 1.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]

    @classmethod
    def of(cls, topk: int, depth: int, nodes: int = 0) -> TreeShape:
        """Return the tree with `topk` children everywhere, or its `nodes` most promising nodes.

        A node promises more the fewer steps away from first choices lead to it, and the shallower it is:
        first comes the chain of first choices.
        """
        paths: list[tuple[int, ...]] = []
        level: list[tuple[int, ...]] = [()]
        for _ in range(depth):
            level = [(*path, rank) for path in level for rank in range(topk)]
            paths += level
        if nodes:
            paths = sorted(paths, key=lambda path: (sum(path), len(path), path))[:nodes]
        paths.sort(key=lambda path: (len(path), path))
        number = {path: index for index, path in enumerate(paths)}
        return cls(
            parents=tuple(number.get(path[:-1], -1) for path in paths),
            ranks=tuple(path[-1] for path in paths),
            depths=tuple(map(len, paths)),
        )

    @property
    def num(self) -> int:
        """Return the number of nodes."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Return the number of levels."""
        return max(self.depths)

    def nodes_within(self, limit: int, slots: int) -> int:
        """Return how many nodes the whole levels hold that fit a run of `limit` and so many slots."""
        for depth in range(min(limit, self.depth), 0, -1):
            num = sum(d <= depth for d in self.depths)
            if num <= slots:
                return num
        return 0


def draft_tree(
    runner: ModelRunner,
    context: DraftContext,
    missing: Sequence[Sequence[int]],
    starts: Sequence[int],
    *,
    shape: TreeShape,
    vocabulary: DraftVocabulary,
    home: torch.device,
    adjust: Adjust | None = None,
) -> Proposal:
    """Draft a tree of fixed shape per row, cut to whole levels where budget or context are short.

    Siblings are drawn one after another from the processed law of their place without the earlier ones;
    q of each is that conditional law. Once nothing is left to draw from (temperature 0, a short top-k),
    the next sibling is the likeliest token not yet taken, and q the point mass on it. For the other
    arguments see `draft_chain`; the draft's cache holds nothing of the tree afterwards.
    """
    device, vocab = runner.device, vocabulary.target
    batch = len(context.tokens)
    sampling = context.sampling.to(device)
    uniform = context.random.to(device).uniform(Purpose.DRAFT, shape.num)
    offered = [
        shape.nodes_within(limit, slots) for limit, slots in zip(context.limits, context.slots, strict=True)
    ]
    parents = torch.tensor(shape.parents, device=device).expand(batch, -1)
    follows = ancestors(parents)
    counts = [len(tokens) for tokens in missing]
    logits = runner.forward(
        padded(missing, device), starts, counts, keep=[count - 1 for count in counts]
    ).logits
    held = [start + count for start, count in zip(starts, counts, strict=True)]
    expanded: list[int] = []  # the nodes run through the draft, in the order of their slots
    frontier = [-1]
    tokens = torch.zeros(batch, shape.num, dtype=torch.int64, device=device)
    laws: list[Distribution] = []
    while True:
        drawn = [node for node, parent in enumerate(shape.parents) if parent in frontier]
        rows = torch.tensor([node + 1 for node in frontier], device=device)
        history = context.history(tokens, follows[:, rows])
        scores = vocabulary.logits(logits)
        if adjust is not None:
            ahead = torch.tensor([shape.depths[node] if node >= 0 else 0 for node in frontier], device=device)
            scores = adjust(scores, torch.tensor(held, device=device)[:, None] + ahead)
        allowed = _allowed(context, tokens, shape.parents[: drawn[0]], frontier, scores)
        law = process(scores, sampling, history, allowed)
        places = [frontier.index(shape.parents[node]) for node in drawn]
        level, level_laws = _siblings(
            law,
            scores,
            places,
            [shape.ranks[node] for node in drawn],
            uniform[:, drawn],
        )
        tokens[:, drawn] = level
        laws.append(level_laws)
        frontier = [node for node in drawn if node in shape.parents]
        if not frontier:
            break
        first_child = shape.parents.index(frontier[0])
        wanted = [int(count > first_child) for count in offered]
        if not any(wanted):
            break
        expanded += frontier
        offset = len(expanded) - len(frontier)
        area = torch.tensor(expanded, device=device)
        visible = follows[:, [node + 1 for node in frontier]][..., area]
        depths = torch.tensor([shape.depths[node] - 1 for node in expanded], device=device)
        logits = runner.forward(
            vocabulary.read_drafts(tokens[:, frontier]),
            [slot + offset for slot in held],
            [flag * len(frontier) for flag in wanted],
            tree=TreeWindow(depths.expand(batch, -1), visible, offset),
        ).logits
    num = sum(part.shape[1] for part in laws)
    tokens, parents = tokens[:, :num].to(home), parents[:, :num].to(home)
    offered = [min(count, num) for count in offered]
    if laws[0].probs is None:
        return Proposal.trees(tokens, parents, offered, Distribution.point(tokens))
    probs = torch.cat([part.to_dense(vocab) for part in laws], 1).to(home)
    if probs.shape[-1] < vocab:
        probs = torch.nn.functional.pad(probs, (0, vocab - probs.shape[-1]))
    return Proposal.trees(tokens, parents, offered, Distribution.dense(probs))


def _allowed(
    context: DraftContext,
    tokens: Tensor,
    parents: Sequence[int],
    frontier: Sequence[int],
    scores: Tensor,
) -> Tensor | None:
    """Return what grammars allow under each node of the frontier, `[B, F, V']`; None without any.

    Where the draft has no allowed token everything is: verification will refuse whatever comes.
    """
    if context.matchers is None:
        return None
    allowed = torch.ones_like(scores, dtype=torch.bool)
    nodes = tokens[:, : len(parents)].tolist()
    for row, matcher in enumerate(context.matchers):
        if matcher is not None:
            _, bits = window_masks(matcher, nodes[row], parents)
            rows = unpack(bits[[node + 1 for node in frontier]], scores.shape[-1])
            allowed[row] = rows.to(scores.device)
    possible = (allowed & (scores > -torch.inf)).any(-1, keepdim=True)
    return allowed | ~possible


def _siblings(
    law: Distribution, logits: Tensor, places: Sequence[int], ranks: Sequence[int], uniform: Tensor
) -> tuple[Tensor, Distribution]:
    """Draw the children of some places without replacement.

    Args:
        law: of each place, `[B, F]`.
        logits: `[B, F, V]`, for a choice where nothing is left to draw from.
        places: the place of each child, `[N]`, and
        ranks: its rank among its siblings, `[N]`; siblings come in order.
        uniform: one number per child, `[B, N]`.

    Returns:
        Tokens `[B, N]` and the law each was drawn from.
    """
    taken = torch.zeros_like(logits, dtype=torch.bool)
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    for index, (place, rank) in enumerate(zip(places, ranks, strict=True)):
        next_best = logits[:, place].masked_fill(taken[:, place], -torch.inf).argmax(-1)
        if law.tokens is not None:
            token = law.tokens[:, place] if rank == 0 else next_best
        else:
            assert law.probs is not None
            left = law.probs[:, place].masked_fill(taken[:, place], 0.0)
            mass = left.sum(-1, keepdim=True)
            empty = mass[:, 0] <= 0
            drawn = Distribution.dense(torch.where(empty[:, None], 1.0, left)).sample(uniform[:, index])
            token = torch.where(empty, next_best, drawn)
            certain = torch.zeros_like(left).scatter_(-1, token[:, None], 1.0)
            conditional = left if rank == 0 else left / mass
            laws.append(torch.where(empty[:, None], certain, conditional))
        taken[:, place].scatter_(-1, token[:, None], True)
        tokens.append(token)
    chosen = torch.stack(tokens, 1)
    return chosen, Distribution.dense(torch.stack(laws, 1)) if laws else Distribution.point(chosen)
