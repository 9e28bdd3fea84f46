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
