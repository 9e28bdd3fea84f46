"""Early exit: the target's own first layers, then its final norm and head, as the draft.

Weights are shared, and so is the cache of those layers: drafting writes the entries that verification
will write again, with the same values, so there is no draft cache and nothing to catch up. Related:
Zhang et al. 2309.08168 (Draft & Verify), Elhoushi et al. 2404.16710 (LayerSkip). A model that was not
trained for it drafts badly this way, and the tables show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specbench.decoding.verification import RULES, Proposal, RuleName
from specbench.errors import IncompatibleError
from specbench.policies import length_policy
from specbench.registry import PolicySpec
from specbench.runtime.protocols import DraftContext, DraftMemory, Resources, Strategy
from specbench.runtime.runner import ModelRunner, decoder_layers
from specbench.strategies._autoregressive import draft_chain
from specbench.strategies._vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class Options:
    """Draft up to `k` tokens with the first `layers` layers; the rule that verifies; how many to draft."""

    layers: int = 8
    k: int = 3
    verify: RuleName = "rejection"
    policy: PolicySpec = "fixed"

    def __post_init__(self) -> None:
        """Refuse values that draft nothing."""
        if self.layers < 1:
            raise ValueError(f"layers={self.layers}; expected at least 1")
        if self.k < 1:
            raise ValueError(f"k={self.k}; a draft has at least 1 token")


class EarlyExitDrafter:
    """Runs the first layers of the target over the target's own slots."""

    needs_features: ClassVar[tuple[int, ...]] = ()
    shares_target_cache: ClassVar[bool] = True

    def __init__(self, target: ModelRunner, layers: int) -> None:
        self.runner = target.first_layers(layers)
        self.runners: Sequence[ModelRunner] = (self.runner,)
        self.vocabulary = DraftVocabulary(target.vocab, target.vocab)

    def prefill(self, first_row: int, prompts: Sequence[list[int]], features: dict[int, Tensor]) -> None:
        """Nothing to do: the target's prefill filled the shared layers."""

    def propose(self, context: DraftContext) -> Proposal:
        """Draft from each row's last token onward."""
        return draft_chain(
            self.runner,
            context,
            missing=[tokens[-1:] for tokens in context.tokens],
            starts=[len(tokens) - 1 for tokens in context.tokens],
            vocabulary=self.vocabulary,
            home=self.runner.device,
        )

    def commit(self, accepted: Sequence[int], features: dict[int, Tensor]) -> None:
        """Nothing to do: verification wrote the shared layers."""

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Nothing to do: the target's slots are copied anyway."""

    def release(self, rows: Sequence[int]) -> None:
        """Nothing to do."""

    def memory(self) -> DraftMemory:
        """Nothing beyond the target's own."""
        return DraftMemory()


def build(options: Options, name: str, resources: Resources) -> Strategy:
    """Build the strategy; raises IncompatibleError if the target has fewer layers than asked for."""
    parent, layers = decoder_layers(resources.target.model)
    depth = len(getattr(parent, layers))
    if options.layers > depth:
        raise IncompatibleError(
            f"strategy '{name}' wants {options.layers} layers; the target has {depth}",
            hint=f"write early-exit:layers=N with N at most {depth}",
        )
    rule = RULES[options.verify]()
    drafter = EarlyExitDrafter(resources.target, options.layers)
    return Strategy(name, drafter, rule, length_policy(options.policy, options.k), lossless=rule.lossless)
