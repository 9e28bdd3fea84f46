"""For the test suites of other engines: assert that a decoder samples from its target's distribution.

Light to import: torch is loaded by the first audit. What is checked and how is in AUDIT terms in
`audit.black_box`; this file knows how a call is written, what is wrong with one, and what is raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specbench.audit.budget import BUDGETS, RUN_ALPHA, Budget, budget_named
from specbench.audit.lossless_result import GreedyFindings, LosslessResult
from specbench.errors import UsageError
from specbench.records import SamplingParams

if TYPE_CHECKING:
    from specbench.audit.black_box import Generate

__all__ = [
    "Budget",
    "GreedyFindings",
    "LosslessResult",
    "SamplingParams",
    "assert_lossless",
    "audit",
    "budget_of",
]

FEWEST_TOKENS = 600
"""With fewer, nothing smaller than a TV of .2 could be noticed."""
FEWEST_NEW_TOKENS = 8
"""Shorter outputs never reach beyond a round whose drafts were all accepted."""


def assert_lossless(
    generate: Generate,
    target: Any,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    sampling: SamplingParams | None = None,
    *,
    allow_inconclusive: bool = False,
    **options: Any,
) -> LosslessResult:
    """Audit a decoder; raise AssertionError unless its outputs are distributed as the target's own.

    Takes what `audit` takes. An audit that could not decide raises too, unless `allow_inconclusive`: a test
    that measured nothing must not be green.

    Raises:
        AssertionError: FAIL or INCONCLUSIVE, in one paragraph; its attribute `result` says it in numbers.
        UsageError: the call is wrong, or `generate` did not return outputs.
    """
    __tracebackhide__ = True
    result = audit(generate, target, tokenizer, prompts, sampling, **options)
    if result.verdict == "PASS" or (result.verdict == "INCONCLUSIVE" and allow_inconclusive):
        return result
    error = AssertionError(result.message)
    error.result = result  # type: ignore[attr-defined] # for those who catch it
    raise error


def audit(
    generate: Generate,
    target: Any,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    sampling: SamplingParams | None = None,
    *,
    budget: str | int | Budget = "quick",
    draft: Any = None,
    greedy: bool = False,
    max_new_tokens: int = 32,
    eos_ids: Sequence[int] | None = None,
    speculated: Callable[[], tuple[int, int]] | None = None,
    alpha: float = RUN_ALPHA,
    seed: int = 0,
    batch_size: int = 32,
    name: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LosslessResult:
    """Audit a decoder of which only the outputs are known, and return the verdict.

    Its outputs are scored whole, the first token and EOS included, in the order of the prompts, by plain
    float32 forwards of the target. Each output counts, however it came about. At temperature above 0 an
    e-process bets on some 35 ways of being wrong, and others watch for tokens outside the support, for
    requests that share random numbers, and for continuations that come more often than they should. At
    temperature 0 every token's distance from the largest logit is judged, and the first difference from
    ordinary greedy decoding is a near-tie or real. Two streams that the reference draws itself are judged as
    well: plain sampling must not alarm, sampling at 1.5 times the temperature must.

    PASS means that a systematic deviation of the budget's size would have been found, on these prompts. A
    deviation without a system, and one that other prompts or longer outputs would show, may remain. It does
    not mean that anything was drafted, unless `speculated` proves it.

    Args:
        generate: `generate(prompts, sampling)` returns one list of new token ids per prompt, in the order of
            the prompts, EOS included where it came. A call holds the same prompt several times; each request
            needs random numbers of its own. `sampling.seed` is new in every call.
        target: the transformers model that `generate` claims to sample from, in float32 and evaluation mode.
        tokenizer: encodes prompts that are strings; may be None where there are none.
        prompts: strings or token ids. Some should repeat themselves if the drafter copies.
        sampling: temperature 1 and nothing else by default. Its seed and length are set here.
        budget: "quick", "standard", "deep", or a number of scored tokens, which then promises to find a TV of
            .04 (15,000 / tokens)^.5 per token.
        draft: the draft model (or a `DraftLaw`), so that bets on its tokens are exact. By default a synthetic
            one stands in, which finds faults of verification only when they are large: give it where you can.
        greedy: audit temperature 0 as well, with a quarter of the tokens.
        max_new_tokens: of each output. It must exceed the longest draft by 3.
        eos_ids: what ends an output; those of the target's generation configuration by default.
        speculated: returns (drafted, accepted), counted since the call of this function. Without it the
            result says that speculation is not proved.
        alpha: the chance that a correct decoder is accused.
        seed: of everything drawn here, and of the seeds handed out.
        batch_size: prompts per call.
        name: in reports; by default the function's own.
        progress: told (tokens scored, tokens planned).

    Raises:
        UsageError: the call is wrong, or `generate` did not return outputs.
    """
    from specbench.audit.black_box import Subject, examine, longest_prompt

    asked = sampling if sampling is not None else SamplingParams()
    _require_model(target)
    if asked.stop_strings or asked.grammar:
        raise UsageError(
            "stop strings and grammars depend on text, which is not scored",
            hint="leave them out of `sampling`",
        )
    if draft is not None and not hasattr(draft, "laws") and not hasattr(draft, "config"):
        raise UsageError(
            f"the draft is a {type(draft).__name__}; expected a causal language model of transformers",
            hint="leave it out where the drafter is no model",
        )
    if not 0 < alpha < 1 or batch_size < 1:
        raise UsageError(f"alpha is {alpha}, batch_size {batch_size}; expected 0 to 1, and 1 or more")
    if max_new_tokens < FEWEST_NEW_TOKENS:
        raise UsageError(
            f"max_new_tokens is {max_new_tokens}: no output reaches beyond a fully accepted round",
            hint=f"use {FEWEST_NEW_TOKENS} or more, and more than the longest draft by 3",
        )
    encoded = _encoded(prompts, tokenizer, int(target.config.get_text_config().vocab_size))
    context = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    longest = longest_prompt(encoded, greedy or asked.temperature == 0) + max_new_tokens
    if context is not None and longest > context:
        raise UsageError(
            f"a prompt and its output take {longest} tokens; the target reads {context}",
            hint="shorten the prompts",
        )
    stated = _eos_ids(target) if eos_ids is None else tuple(eos_ids)
    ends = {*asked.stop_token_ids, *(() if asked.ignore_eos else stated)}
    return examine(
        Subject(
            name=name or str(getattr(generate, "__name__", type(generate).__name__)),
            generate=generate,
            model=target,
            sampling=replace(
                asked, max_new_tokens=max_new_tokens, min_new_tokens=min(asked.min_new_tokens, max_new_tokens)
            ),
            prompts=encoded,
            ends=tuple(sorted(ends)),
            budget=budget_of(budget),
            alpha=alpha,
            seed=seed,
            batch=batch_size,
            draft=draft,
            also_greedy=greedy,
            speculated=speculated,
            progress=progress or (lambda scored, planned: None),
        )
    )


def budget_of(budget: str | int | Budget) -> Budget:
    """Return a budget by name or by number of tokens; the promise of a number follows from "quick"'s."""
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, str) and not budget.isdecimal():
        return budget_named(budget)
    tokens = int(budget)
    if tokens < FEWEST_TOKENS:
        raise UsageError(
            f"{tokens} tokens could show nothing smaller than a TV of .2",
            hint=f"use {FEWEST_TOKENS} or more, or one of {', '.join(BUDGETS)}",
        )
    quick = BUDGETS["quick"]
    promised = quick.promised_tv * math.sqrt(quick.tokens / tokens)
    return Budget(f"{tokens} tokens", tokens, math.ceil(1000 * promised - 1e-9) / 1000)


def _require_model(target: Any) -> None:
    """Refuse a target that cannot be the reference."""
    if not hasattr(target, "config") or not hasattr(target, "parameters"):
        raise UsageError(
            f"the target is a {type(target).__name__}; expected a causal language model of transformers"
        )
    dtype = str(next(target.parameters()).dtype).removeprefix("torch.")
    if dtype not in ("float32", "float64"):
        raise UsageError(
            f"the target is in {dtype}, whose rounding would be taken for a fault of the decoder",
            hint="load it in float32, and let the decoder use float32 too",
        )


def _encoded(
    prompts: Sequence[str | Sequence[int]], tokenizer: Any, vocab: int
) -> tuple[tuple[int, ...], ...]:
    """Return the prompts as token ids."""
    if isinstance(prompts, str) or not prompts:
        raise UsageError("no prompts; expected a list of strings or of token ids")
    found = []
    for prompt in prompts:
        if isinstance(prompt, str) and tokenizer is None:
            raise UsageError("a prompt is a string and there is no tokenizer", hint="pass one, or token ids")
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        found.append(tuple(int(token) for token in ids))
    for ids in found:
        if not ids or not all(0 <= token < vocab for token in ids):
            raise UsageError(
                "a prompt is empty or holds ids that the target does not know",
                hint=f"prompts are one or more token ids from 0 to {vocab - 1}",
            )
    return tuple(dict.fromkeys(found))


def _eos_ids(target: Any) -> tuple[int, ...]:
    """Return what `generate` of transformers would end an output at."""
    for config in (getattr(target, "generation_config", None), target.config):
        stated = getattr(config, "eos_token_id", None)
        if stated is not None:
            return tuple(stated) if isinstance(stated, list | tuple) else (int(stated),)
    return ()
