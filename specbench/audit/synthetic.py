"""A drafter of any wanted acceptance, for any target and without a second model: see `regimes`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from specbench.audit.regimes import draft_logits
from specbench.runtime.cache import SlotCache
from specbench.runtime.protocols import Strategy
from specbench.runtime.runner import ModelRunner
from specbench.strategies._tree import TreeShape
from specbench.strategies._vocabulary import DraftVocabulary
from specbench.strategies.draft import ModelDrafter


def _noisy(scale: float, logits: Tensor, positions: Tensor) -> Tensor:
    return draft_logits(logits, positions, scale)


def with_synthetic_draft(
    strategy: Strategy, target: ModelRunner, scale: float, *, rows: int, width: int
) -> Strategy:
    """Return a strategy whose drafter is replaced by the target with noise on its logits.

    What is exercised otherwise stays: the rule, the length policy, chains or trees, rollback and commit.
    A strategy that offers trees is given a tree of fixed shape, as deep, of up to as many nodes.
    """
    runner = ModelRunner(target.model, SlotCache(rows, width))
    drafter = ModelDrafter(
        runner,
        DraftVocabulary(target.vocab, target.vocab),
        home=target.device,
        weights=0,
        shape=_shape(strategy),
    )
    drafter.adjust = partial(_noisy, scale)
    nodes = drafter.shape.num if drafter.shape is not None else 0
    return replace(strategy, drafter=drafter, max_nodes=nodes)


def _shape(strategy: Strategy) -> TreeShape | None:
    own = getattr(strategy.drafter, "shape", None)
    if isinstance(own, TreeShape):
        return own
    if not strategy.max_nodes:
        return None
    depth = min(strategy.max_draft, 4)
    return TreeShape.of(2, depth, min(strategy.max_nodes, 2 ** (depth + 1) - 2))
