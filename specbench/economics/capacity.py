"""What speculation takes from the rest of a server: KV memory, tree slots, and spare arithmetic."""

from __future__ import annotations

from collections.abc import Sequence


def sequences_that_fit(
    budget_bytes: int,
    sequence_tokens: int,
    kv_per_token: int,
    *,
    draft_weights: int = 0,
    draft_kv_per_token: int = 0,
    lookahead_tokens: int = 0,
) -> int:
    """Return how many sequences a KV budget holds.

    A draft takes its weights out of the budget once, and per sequence its own KV and the target's slots
    for the proposal. On several ranks every argument is what one rank holds.
    """
    if sequence_tokens < 1 or kv_per_token < 1:
        raise ValueError(
            f"a sequence of {sequence_tokens} tokens at {kv_per_token} bytes each holds no KV; "
            "expected both to be at least 1"
        )
    per_sequence = sequence_tokens * (kv_per_token + draft_kv_per_token)
    per_sequence += lookahead_bytes(lookahead_tokens, kv_per_token)
    return max(0, budget_bytes - draft_weights) // per_sequence


def sequences_lost(
    budget_bytes: int,
    sequence_tokens: int,
    kv_per_token: int,
    *,
    draft_weights: int,
    draft_kv_per_token: int = 0,
    lookahead_tokens: int = 0,
) -> int:
    """Return the sequences that fit without the draft, less those that fit with it."""
    without = sequences_that_fit(budget_bytes, sequence_tokens, kv_per_token)
    return without - sequences_that_fit(
        budget_bytes,
        sequence_tokens,
        kv_per_token,
        draft_weights=draft_weights,
        draft_kv_per_token=draft_kv_per_token,
        lookahead_tokens=lookahead_tokens,
    )


def lookahead_bytes(lookahead_tokens: int, kv_per_token: int) -> int:
    """Return the target KV reserved for one sequence's proposal: every node of a tree, not its depth."""
    return lookahead_tokens * kv_per_token


def tree_drafts(branches: Sequence[int]) -> int:
    """Return the draft tokens of a tree whose nodes at depth i each have `branches[i]` children.

    The root is the last committed token, not a draft.

    >>> tree_drafts([2, 2, 2])
    14
    """
    drafts, level = 0, 1
    for children in branches:
        level *= children
        drafts += level
    return drafts


def tree_nodes(branches: Sequence[int]) -> int:
    """Return the nodes of a tree with its root: the positions that one verifying forward computes."""
    return 1 + tree_drafts(branches)


def decode_intensity(batch: int, drafted: float = 0.0) -> float:
    """Return the positions one read of the weights serves, about the arithmetic intensity of a decode step.

    Compare it with the accelerator's crossover (peak arithmetic / memory bandwidth, in the same units):
    below it the extra positions of verification are nearly free, above it each one costs.
    """
    return batch * (1 + drafted)
