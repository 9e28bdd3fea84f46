"""When two models speak the same tokens, so that one may draft for the other."""

from __future__ import annotations

from typing import Any

from specbench.errors import IncompatibleError

_SHOWN = 3


def check_vocabulary(
    target_tokenizer: Any, draft_tokenizer: Any, *, target_vocab: int, draft_vocab: int
) -> None:
    """Check that every id both tokenizers use names the same token.

    Equal size is not compatibility, and unequal size is not incompatibility: models are often padded to
    a round number of rows. So ids are compared token by token, over the rows both models have, with
    added and special tokens included. Which id plays the part of `eos` is not compared: the target alone
    decides when to stop, and a base model may draft for its chat version.

    Rows that only the larger model has are allowed as long as neither tokenizer uses them. The draft then
    proposes ids outside the smaller vocabulary with q = 0, and the target's remaining probability there
    is reached through the residual: the output distribution is unchanged.

    Args:
        target_tokenizer: a transformers tokenizer.
        draft_tokenizer: the same.
        target_vocab: rows of the target's output head.
        draft_vocab: rows of the draft's output head.

    Raises:
        IncompatibleError: naming the first ids that differ, with both tokens, and how many differ.
    """
    target, draft = _tokens_by_id(target_tokenizer), _tokens_by_id(draft_tokenizer)
    rows = min(target_vocab, draft_vocab)
    shared = sorted(index for index in target.keys() & draft.keys() if index < rows)
    different = [index for index in shared if target[index] != draft[index]]
    if different or not shared:
        examples = [f"{index} is {target[index]!r} / {draft[index]!r}" for index in different[:_SHOWN]]
        detail = ", ".join(examples) + (", …" if len(different) > _SHOWN else "")
        raise IncompatibleError(
            f"the draft's tokens are not the target's: {len(different)} of {len(shared)} shared ids differ"
            + (f" (target / draft): {detail}" if detail else ""),
            hint="use a draft that has the target's tokenizer; equal vocabulary size is not compatibility",
        )
    for owner, tokens in (("target", target), ("draft", draft)):
        outside = sorted(index for index in tokens if index >= rows)
        if outside:
            first = outside[0]
            raise IncompatibleError(
                f"the {owner}'s tokenizer uses {len(outside)} ids beyond the {rows} rows both models have, "
                f"first {first} ({tokens[first]!r})",
                hint="the other model cannot read these tokens; use a pair that shares one tokenizer",
            )


def _tokens_by_id(tokenizer: Any) -> dict[int, str]:
    """Map each id the tokenizer uses to its token, added and special tokens included."""
    return {index: token for token, index in sorted(tokenizer.get_vocab().items(), reverse=True)}


LEAST_SHARED = 0.5
"""The least share of the draft's tokens that the target must have for one to draft for the other."""


def map_vocabulary(
    target_tokenizer: Any, draft_tokenizer: Any, *, target_vocab: int, draft_vocab: int
) -> tuple[int, ...]:
    """Return the target's id of every id of the draft, -1 where the target has no such token.

    For pairs that `check_vocabulary` refuses: another order of ids, or a draft vocabulary that is a part
    of the target's. Tokens count as the same if their strings are, as in token-level intersection (Timor
    et al. 2502.05202). A token that the draft lacks is never drafted (q = 0) and reached through the
    residual; what it is for the draft to read is one token at a time, in the target's segmentation. The
    output distribution is the target's whatever the map; acceptance is not.

    Raises:
        IncompatibleError: the target has less than half of the draft's tokens.
    """
    target = {
        token: index for index, token in _tokens_by_id(target_tokenizer).items() if index < target_vocab
    }
    draft = {index: token for index, token in _tokens_by_id(draft_tokenizer).items() if index < draft_vocab}
    mapped = tuple(target.get(draft[index], -1) if index in draft else -1 for index in range(draft_vocab))
    shared = sum(index >= 0 for index in mapped)
    if shared < LEAST_SHARED * len(draft):
        raise IncompatibleError(
            f"the target has {shared} of the draft's {len(draft)} tokens; too few to map one to the other",
            hint="use a draft that has the target's tokenizer",
        )
    return mapped


def fit_vocabulary(
    target_tokenizer: Any, draft_tokenizer: Any, *, target_vocab: int, draft_vocab: int
) -> tuple[int, ...] | None:
    """Return None where both models use the same ids, else the map of `map_vocabulary`.

    Raises:
        IncompatibleError: the ids differ and too few tokens are shared.
    """
    sizes = {"target_vocab": target_vocab, "draft_vocab": draft_vocab}
    try:
        check_vocabulary(target_tokenizer, draft_tokenizer, **sizes)
    except IncompatibleError as different:
        try:
            return map_vocabulary(target_tokenizer, draft_tokenizer, **sizes)
        except IncompatibleError as unlike:
            raise IncompatibleError(f"{different.message}; {unlike.message}", hint=unlike.hint) from None
    return None
