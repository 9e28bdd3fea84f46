"""The draft's tokens in the target's ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.errors import IncompatibleError

_HINT = "a map holds the target's id of each draft id, -1 for none; not differences of ids"


class DraftVocabulary:
    """What a draft writes and reads, translated to and from the target's ids.

    A target token that the draft lacks has q = 0, and reads to the draft as token 0; whatever it makes of
    that, q is the law that it draws from.

    Args:
        target: tokens of the target, V.
        draft: tokens of the draft.
        ids: the target's id of each of the draft's, -1 where it has none; None if they are the same.
        device: the draft's.

    Raises:
        IncompatibleError: the map names a token that a model lacks, or one target token twice.
    """

    def __init__(
        self, target: int, draft: int, ids: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.target = target
        self.draft = draft
        self.reads: list[int] | None = None
        if ids is not None:
            if min(ids, default=0) < -1:
                raise IncompatibleError(f"the vocabulary map holds {min(ids)}, which is no token", hint=_HINT)
            pairs = [(own, other) for own, other in enumerate(ids) if other >= 0]
            _check_pairs(pairs, target, draft)
            self.own, self.theirs = torch.tensor(pairs, device=device).T
            self.reads = [0] * target
            for own, other in pairs:
                self.reads[other] = own
            self.table = torch.tensor(self.reads, device=device)

    def logits(self, logits: Tensor) -> Tensor:
        """Return the draft's logits `[..., draft]` in the target's ids, `[..., V]` or fewer."""
        if self.reads is None:
            return logits[..., : self.target]
        mapped = logits.new_full((*logits.shape[:-1], self.target), -torch.inf)
        return mapped.index_copy_(-1, self.theirs, logits[..., self.own])

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Return the target's tokens as the draft reads them."""
        if self.reads is not None:
            return [self.reads[token] for token in tokens]
        if self.draft >= self.target:
            return list(tokens)
        return [token if token < self.draft else 0 for token in tokens]

    def read_drafts(self, tokens: Tensor) -> Tensor:
        """Return drafted tokens, which the draft has, in its own ids."""
        return tokens if self.reads is None else self.table[tokens]


def _check_pairs(pairs: Sequence[tuple[int, int]], target: int, draft: int) -> None:
    """Refuse what is no map of ids: a table of offsets, say, as some checkpoints store theirs."""
    if not pairs:
        raise IncompatibleError("the vocabulary map is empty: the draft could propose nothing", hint=_HINT)
    own, theirs = max(own for own, _ in pairs), max(other for _, other in pairs)
    if own >= draft or theirs >= target:
        raise IncompatibleError(
            f"the vocabulary map goes from draft token {own} and to target token {theirs}; the models have "
            f"{draft} and {target} tokens",
            hint=_HINT,
        )
    if len({other for _, other in pairs}) < len(pairs):
        raise IncompatibleError("the vocabulary map gives two draft tokens one id of the target", hint=_HINT)
