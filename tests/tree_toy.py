"""Trees over the toy model: how they are drawn, the exact law of what a round emits, and a whole decoder.

Here too a context is its last two tokens, so that every node has a law of its own and a row out of place
shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from specbench.decoding.distribution import Distribution
from specbench.decoding.processing import SamplingTensors, process
from specbench.decoding.random_numbers import Purpose, RoundRandom, stream_keys
from specbench.decoding.verification import Proposal, RejectionSampling, Rule
from specbench.records import Request
from tests.toy import Toy, histories, just_above, just_below, number_of

Draw = Literal["without replacement", "with replacement", "certain"]
"""How siblings come about: drawn one after the other, independently, or the most likely ones."""

SHAPES: dict[str, list[int]] = {
    "nothing": [],
    "one": [-1],
    "chain": [-1, 0, 1],
    "siblings": [-1, -1, -1],
    "pairs": [-1, -1, 0, 0],
    "depth first": [-1, 0, 0, -1, 3],
    "siblings apart": [-1, 0, -1, 1, 0],
}
"""Parents of each node. In the last one a node's grandchild comes before its second child."""


def depth_of(parents: Sequence[int]) -> int:
    """Return the number of nodes on the longest way down."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return max(depths)


def as_rows(shapes: Sequence[Sequence[int]], width: int) -> Tensor:
    """Put the parents of each row into one tensor, `[B, width]`; what is not offered goes on as a chain."""
    rows = [[*shape, *range(len(shape) - 1, width - 1)] for shape in shapes]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(shapes), width)


def contexts(last_two: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
    """Return the last two tokens at the root and after each node, `[B, N + 1, 2]`."""
    found = [last_two]
    for i in range(tokens.shape[1]):
        before = torch.stack(found, 1)[torch.arange(len(tokens)), parents[:, i] + 1]
        found.append(torch.stack([before[:, 1], tokens[:, i]], 1))
    return torch.stack(found, 1)


def node_law(probs: Tensor, last_two: Tensor, tokens: Tensor, parents: Tensor, i: int, draw: Draw) -> Tensor:
    """Return the law of node i given all nodes before it, `[B, V]`."""
    context = contexts(last_two, tokens[:, :i], parents[:, :i])
    place = context[torch.arange(len(tokens)), parents[:, i] + 1]
    law = probs[place[:, 0], place[:, 1]]
    if draw != "with replacement":
        for j in range(i):
            without = law.scatter(1, tokens[:, j : j + 1], 0.0)
            law = torch.where((parents[:, j] == parents[:, i])[:, None], without, law)
    law = law / law.sum(1, keepdim=True)
    if draw == "certain":
        return torch.zeros_like(law).scatter(1, law.argmax(1, keepdim=True), 1.0)
    return law


def tree_rounds(
    rule: RejectionSampling,
    p: Tensor,
    q: Tensor,
    shapes: Sequence[Sequence[int]],
    draw: Draw = "without replacement",
    *,
    p_is_point: bool = False,
) -> list[list[Tensor]]:
    """Return for each shape the law of what one round emits: for n = 1 to N + 1, `[V * V, V ** n]`.

    All shapes, contexts, tokens that can be drawn and regions of coins form one batch of ragged trees. A
    node has two regions, kept and refused; the edge between them is computed here, from the definition.
    """
    vocab, width = p.shape[-1], max(map(len, shapes)) + 1
    pieces = [_enumerate(p, q, shape, width, draw) for shape in shapes]
    last_two, tokens, coins, weight, laws = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    owner = torch.repeat_interleave(
        torch.arange(len(shapes)), torch.tensor([len(piece[3]) for piece in pieces])
    )
    parents = as_rows(shapes, width)[owner]
    offered = [len(shapes[shape]) for shape in owner.tolist()]
    rows = p[tuple(contexts(last_two, tokens, parents).unbind(-1))]
    target = Distribution.point(rows.argmax(-1)) if p_is_point else Distribution.dense(rows)
    law_of_draft = Distribution.point(tokens) if draw == "certain" else Distribution.dense(laws)
    walk, law = rule.walk(target, Proposal.trees(tokens, parents, offered, law_of_draft), coins)
    next_law = law.to_dense(vocab, torch.float64)
    emission = weight[:, None] * next_law / next_law.sum(1, keepdim=True)
    emitted: list[list[Tensor]] = []
    for shape in range(len(shapes)):
        emitted.append([])
        for n in range(len(shapes[shape]) + 1):
            here = (owner == shape) & (walk.accepted == n)
            run = torch.cat([last_two[here], tokens[here].gather(1, walk.path[here, :n])], 1)
            mass = torch.zeros(vocab ** (2 + n), vocab, dtype=torch.float64)
            mass.index_add_(0, number_of(run, vocab), emission[here])
            emitted[-1].append(mass.reshape(vocab**2, -1))
    return emitted


def _enumerate(p: Tensor, q: Tensor, shape: Sequence[int], width: int, draw: Draw) -> tuple[Tensor, ...]:
    """Return contexts, tokens, coins, probability and draft laws of everything that can happen."""
    vocab, num = p.shape[-1], len(shape)
    everything = histories(vocab, num)
    last_two, tokens = everything[:, :2], everything[:, 2:]
    parents = as_rows([shape] * len(tokens), num)
    laws = [node_law(q, last_two, tokens, parents, i, draw) for i in range(num)]
    weight = torch.ones(len(tokens), dtype=torch.float64)
    for i in range(num):
        weight = weight * laws[i].gather(1, tokens[:, i : i + 1]).squeeze(1)
    possible = weight > 0
    last_two, tokens, weight = last_two[possible], tokens[possible], weight[possible]
    laws = [law[possible] for law in laws]
    edges = _edges(p[tuple(contexts(last_two, tokens, parents[possible]).unbind(-1))], tokens, laws, shape)
    # What is not offered: tokens and coins that would pass, and laws that are no laws.
    unused = width - num
    tokens = torch.cat([tokens, tokens.new_zeros(len(tokens), unused)], 1)
    filled = torch.stack([*laws, *[torch.full((len(tokens), vocab), torch.nan).double()] * unused], 1)
    outcomes = []
    for kept in itertools.product([True, False], repeat=num):
        is_kept = torch.tensor(kept, dtype=torch.bool)
        chance = torch.where(is_kept, edges, 1 - edges).prod(1) * weight
        coins = torch.where(is_kept, just_below(edges), just_above(edges))
        coins = torch.cat([coins, torch.full((len(coins), unused), 2.0**-53, dtype=torch.float64)], 1)
        happens = chance > 0
        outcomes.append([x[happens] for x in (last_two, tokens, coins, chance, filled)])
    return tuple(torch.cat(parts) for parts in zip(*outcomes, strict=True))


def _edges(rows: Tensor, tokens: Tensor, laws: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return with what probability each node is kept once all its earlier siblings were refused, `[B, N]`."""
    edges = torch.zeros(tokens.shape, dtype=torch.float64)
    for i, parent in enumerate(shape):
        left = rows[:, parent + 1]
        for j in range(i):
            if shape[j] == parent:
                difference = (left - laws[j]).clamp(min=0)
                mass = difference.sum(1, keepdim=True)
                left = torch.where(mass > 0, difference / mass, left)
        own = tokens[:, i : i + 1]
        edges[:, i] = (left.gather(1, own) / laws[i].gather(1, own)).clamp(max=1).squeeze(1)
    return edges


def decode_trees(
    target: Toy,
    draft: Toy,
    rule: Rule,
    requests: Sequence[Request],
    shapes: Sequence[Sequence[int]],
    draw: Draw = "without replacement",
) -> list[tuple[int, ...]]:
    """Decode a batch with one tree shape per request, up to each budget; nothing else ends a request.

    The draft draws at temperature 1 whatever the request's parameters: a rule has to cope with any q.
    """
    sampling = SamplingTensors.of([request.sampling for request in requests])
    keys = stream_keys([request.sampling.seed for request in requests])
    parents = as_rows(shapes, max(map(len, shapes)))
    offered = [len(shape) for shape in shapes]
    outputs: list[list[int]] = [[] for _ in requests]
    for number in itertools.count():
        budgets = [request.sampling.max_new_tokens for request in requests]
        if all(len(output) >= budget for output, budget in zip(outputs, budgets, strict=True)):
            break
        heads = [(*request.prompt, *output)[-2:] for request, output in zip(requests, outputs, strict=True)]
        last_two = torch.tensor(heads)
        positions = torch.tensor([len(output) for output in outputs])
        random = RoundRandom(keys, positions, torch.full_like(positions, number))
        uniforms = random.uniform(Purpose.DRAFT, parents.shape[1])
        tokens, laws = torch.zeros_like(parents), []
        for i in range(parents.shape[1]):
            laws.append(node_law(draft.probs, last_two, tokens, parents, i, draw))
            tokens[:, i] = Distribution.dense(laws[-1]).sample(uniforms[:, i])
        q = Distribution.point(tokens)
        if draw != "certain" and laws:
            q = Distribution.dense(torch.stack(laws, 1))
        logits = target.logits[tuple(contexts(last_two, tokens, parents).unbind(-1))]
        proposal = Proposal.trees(tokens, parents, offered, q)
        outcome = rule.verify(process(logits, sampling), proposal, random)
        for row, output in enumerate(outputs):
            path = outcome.path[row, : int(outcome.accepted[row])]
            output += [*tokens[row, path].tolist(), int(outcome.next_token[row])]
    return [
        tuple(output[: request.sampling.max_new_tokens])
        for output, request in zip(outputs, requests, strict=True)
    ]
