"""Speculative decoding with a second, smaller model: Leviathan et al. 2211.17192, Chen et al. 2302.01318.

The draft may live on another device; the transfer of its tokens and probabilities counts as draft time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specbench.decoding.padding import padded
from specbench.decoding.verification import RULES, Proposal, RuleName
from specbench.errors import IncompatibleError
from specbench.policies import length_policy
from specbench.registry import PolicySpec
from specbench.runtime.cache import SlotCache
from specbench.runtime.protocols import DraftContext, DraftMemory, Resources, Strategy
from specbench.runtime.runner import ModelRunner
from specbench.strategies._autoregressive import Adjust, draft_chain
from specbench.strategies._tree import TreeShape, draft_tree
from specbench.strategies._vocabulary import DraftVocabulary

MOST_NODES = 60
"""The largest tree: every node is a row of the target's forward, and needs a slot."""


@dataclass(frozen=True, slots=True)
class Options:
    """Draft up to `k` tokens with the draft model; the rule that verifies; how many to draft.

    With `topk` above 1 a tree: so many children everywhere, `depth` levels (0: k), cut to its `nodes` most
    promising nodes (0: all).
    """

    k: int = 4
    verify: RuleName = "rejection"
    policy: PolicySpec = "fixed"
    topk: int = 1
    depth: int = 0
    nodes: int = 0

    def __post_init__(self) -> None:
        """Refuse a draft of nothing, and what no tree can be."""
        if self.k < 1:
            raise ValueError(f"k={self.k}; a draft has at least 1 token")
        if self.topk < 1:
            raise ValueError(f"topk={self.topk}; a node has at least 1 child")
        if self.topk == 1 and (self.depth or self.nodes):
            raise ValueError("depth and nodes shape a tree; add topk=2 or more, or give k alone")
        if min(self.depth, self.nodes) < 0:
            raise ValueError("depth and nodes are 0 (as given by k and topk) or more")
        levels = self.depth or self.k
        if self.topk > 1 and not self.nodes and self.topk ** (levels + 1) > MOST_NODES:
            raise ValueError(
                f"topk={self.topk}, depth={levels} is a tree of more than {MOST_NODES} nodes; give nodes=N"
            )
        if self.topk > 1 and not RULES[self.verify].judges_trees:
            raise ValueError(f"verify={self.verify} judges chains; for a tree use rejection or exact")
        if self.topk > 1 and length_policy(self.policy, levels).stop_below > 0:
            raise ValueError(
                f"policy={self.policy} stops at a doubtful token; a tree's shape is fixed before it is drawn"
            )
        if self.nodes > MOST_NODES:
            raise ValueError(f"nodes={self.nodes}; expected at most {MOST_NODES}")

    @property
    def shape(self) -> TreeShape | None:
        """Return the shape of the tree; None for a chain."""
        return TreeShape.of(self.topk, self.depth or self.k, self.nodes) if self.topk > 1 else None


class ModelDrafter:
    """A draft model with its own slot cache, whose rows follow the target's.

    `held[row]` counts the slots that hold committed tokens. What was drafted and rejected lies beyond.
    """

    needs_features: ClassVar[tuple[int, ...]] = ()
    shares_target_cache: ClassVar[bool] = False

    def __init__(
        self,
        runner: ModelRunner,
        vocabulary: DraftVocabulary,
        *,
        home: torch.device,
        weights: int,
        shape: TreeShape | None = None,
    ) -> None:
        self.runner = runner
        self.runners: Sequence[ModelRunner] = (runner,)
        self.vocabulary = vocabulary
        self.home = home
        self.adjust: Adjust | None = None
        self.weights = weights
        self.shape = shape
        self.held: dict[int, int] = {}
        self.drafted: Sequence[int] = ()

    def prefill(self, first_row: int, prompts: Sequence[list[int]], features: dict[int, Tensor]) -> None:
        """Fill the draft's cache with the prompts."""
        del features
        counts = [len(prompt) for prompt in prompts]
        # No logits are wanted, but a model must be asked for some: one position.
        self.runner.forward(
            padded([self.vocabulary.read(prompt) for prompt in prompts], self.runner.device),
            [0] * len(prompts),
            counts,
            first_row=first_row,
            keep=[0] * len(prompts),
        )
        self.held.update({first_row + index: count for index, count in enumerate(counts)})

    def propose(self, context: DraftContext) -> Proposal:
        """Catch up with what was committed, then draft."""
        rows = range(len(context.tokens))
        missing = [self.vocabulary.read(context.tokens[row][self.held[row] :]) for row in rows]
        starts = [self.held[row] for row in rows]
        for row in rows:
            self.held[row] = len(context.tokens[row])
        if self.shape is not None:
            # Its nodes do not lie as a run would: what is accepted is read again, with what it leads to.
            self.drafted = [0] * len(rows)
            return draft_tree(
                self.runner,
                context,
                missing,
                starts,
                shape=self.shape,
                vocabulary=self.vocabulary,
                home=self.home,
                adjust=self.adjust,
            )
        proposal = draft_chain(
            self.runner,
            context,
            missing,
            starts,
            vocabulary=self.vocabulary,
            home=self.home,
            adjust=self.adjust,
        )
        self.drafted = proposal.offered
        return proposal

    def commit(self, accepted: Sequence[int], features: dict[int, Tensor]) -> None:
        """Keep the slots of accepted tokens; the last drafted token was never run through the draft."""
        del features
        for row, (kept, drafted) in enumerate(
            zip(accepted, self.drafted or [0] * len(accepted), strict=True)
        ):
            self.held[row] += min(kept, max(drafted - 1, 0))
        self.drafted = ()

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Copy a row's slots."""
        self.runner.cache.copy_row(source, list(targets), self.held[source])
        for target in targets:
            self.held[target] = self.held[source]

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        for row in rows:
            self.held.pop(row, None)

    def memory(self) -> DraftMemory:
        """Return the draft's weights and cache."""
        return DraftMemory(self.weights, self.runner.cache.bytes_per_token, sum(self.held.values()))


def build(options: Options, name: str, resources: Resources) -> Strategy:
    """Build the strategy; raises IncompatibleError if no draft model was given."""
    if resources.draft_model is None:
        raise IncompatibleError(
            f"strategy '{name}' needs a draft model", hint="name one with --draft MODEL, or leave it out"
        )
    rule = RULES[options.verify]()
    runner = ModelRunner(resources.draft_model, SlotCache(resources.rows, resources.width))
    shape = options.shape
    vocabulary = DraftVocabulary(
        resources.target.vocab, runner.vocab_read, resources.draft_ids, device=runner.device
    )
    drafter = ModelDrafter(
        runner,
        vocabulary,
        home=resources.target.device,
        weights=resources.draft_weights,
        shape=shape,
    )
    longest = options.k if shape is None else shape.depth
    return Strategy(
        name,
        drafter,
        rule,
        length_policy(options.policy, longest),
        lossless=rule.lossless,
        max_nodes=0 if shape is None else shape.num,
    )
