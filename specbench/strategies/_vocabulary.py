"""The draft's tokens in the target's ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DraftVocabulary:
    """What a draft writes and reads, translated to and from the target's ids.

    A target token that the draft lacks has q = 0, and reads to the draft as token 0; whatever it makes of
    that, q is the law that it draws from.

    Args:
        target: tokens of the target, V.
        draft: tokens of the draft.
        ids: the target's id of each of the draft's, -1 where it has none; None if they are the same.
        device: the draft's.
    """

    def __init__(
        self, target: int, draft: int, ids: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.target = target
        self.draft = draft
        self.reads: list[int] | None = None
        if ids is not None:
            pairs = [(own, other) for own, other in enumerate(ids) if other >= 0]
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
