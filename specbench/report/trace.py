"""The rounds of one request as trees of drafts: what was offered, what was kept, what came out instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text
from rich.tree import Tree

from specbench.records import RequestRecord, RoundRecord

Show = Callable[[int], str]
"""A token id as it is to be shown."""


@dataclass(frozen=True, slots=True)
class Node:
    """A draft token: its probability under the law it was drawn from, and whether it was kept."""

    token: int
    prob: float
    parent: int
    kept: bool


@dataclass(frozen=True, slots=True)
class Drawn:
    """One round. `extra` is the recovered or bonus token; None where the output ended before it."""

    round: RoundRecord
    start: int
    nodes: tuple[Node, ...]
    emitted: tuple[int, ...]
    extra: int | None


def drawn_rounds(request: RequestRecord, rounds: Sequence[RoundRecord]) -> Iterator[Drawn]:
    """Lay the rounds of a request beside its output, in order."""
    start = 0
    for entry in sorted(rounds, key=lambda r: r.round):
        emitted = request.output_tokens[start : start + entry.emitted]
        nodes = _nodes(entry, emitted)
        extra = emitted[entry.accepted] if len(emitted) > entry.accepted else None
        yield Drawn(entry, start, nodes, emitted, extra)
        start += entry.emitted


def _nodes(entry: RoundRecord, emitted: Sequence[int]) -> tuple[Node, ...]:
    """Find which nodes were kept: the path that the emitted tokens follow, as far as it was accepted.

    What was cut off behind an EOS was accepted as well, but cannot be told from the records.
    """
    tokens, probs = entry.draft_tokens or (), entry.draft_probs or ()
    parents = entry.draft_parents or tuple(range(-1, len(tokens) - 1))
    kept: set[int] = set()
    at = -1
    for token in emitted[: entry.accepted]:
        children = (n for n, parent in enumerate(parents) if parent == at and tokens[n] == token)
        at = next(children, -2)
        if at < 0:
            break
        kept.add(at)
    return tuple(
        Node(token, prob, parent, node in kept)
        for node, (token, prob, parent) in enumerate(zip(tokens, probs, parents, strict=True))
    )


def as_tree(title: str, request: RequestRecord, rounds: Sequence[RoundRecord], show: Show) -> Tree:
    """Return a request as a tree of rounds, each a tree of its drafts."""
    root = Tree(Text(title), guide_style="dim")
    for drawn in drawn_rounds(request, rounds):
        entry = drawn.round
        if entry.round == 0:
            first = show(drawn.emitted[0]) if drawn.emitted else "nothing"
            root.add(Text(f"prefill of {len(request.prompt_tokens)} tokens → {first}"))
            continue
        nodes = "1 token" if entry.drafted == 1 else f"{entry.drafted} tokens"
        depth = f", depth {entry.draft_depth}" if entry.draft_depth != entry.drafted else ""
        head = Text(
            f"round {entry.round} at token {drawn.start}: drafted {nodes}{depth}, accepted {entry.accepted}, "
            f"emitted {entry.emitted}"
        )
        branch = root.add(head)
        places = {-1: branch}
        for index, node in enumerate(drawn.nodes):
            mark, style = ("✓", "green") if node.kept else ("✗", "red")
            label = Text.assemble((mark, style), f" {show(node.token)} ", (f"q={node.prob:.3g}", "dim"))
            places[index] = places[node.parent].add(label)
        if drawn.extra is not None:
            kind = "recovered" if entry.rejected else ("bonus" if entry.drafted else "no draft:")
            branch.add(Text(f"→ {kind} {show(drawn.extra)}"))
        if entry.ended_by != "none":
            branch.add(Text(f"ended by {entry.ended_by}"))
    return root
