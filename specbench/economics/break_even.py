"""When a round of speculation pays: expected tokens, speedup, and the acceptance at which it breaks even.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192).
Our `alpha` is their alpha, `k` their gamma (tokens drafted per round), `draft_cost` their c (seconds of one
drafted position / seconds of one ordinary step). The model takes every draft token to be accepted
independently with probability alpha, and a verifying step to cost as much as an ordinary one.
"""

from __future__ import annotations

import math


def expected_tokens(alpha: float, k: float) -> float:
    """Return the expected tokens of one round, (1 - alpha^(k+1)) / (1 - alpha) (equation 1).

    A mean draft depth may be given as `k`, so it need not be whole.
    """
    _require_acceptance(alpha)
    _require(k >= 0, f"k is {k}; expected 0 or more")
    if alpha == 1:
        return k + 1
    if alpha == 0 or k == 0:
        return 1.0
    # alpha^(k+1) - 1 by expm1: the plain difference loses all its digits as alpha nears 1.
    return -math.expm1((k + 1) * math.log(alpha)) / (1 - alpha)


def predicted_speedup(alpha: float, k: float, draft_cost: float) -> float:
    """Return (1 - alpha^(k+1)) / ((1 - alpha)(k c + 1)), the speedup over ordinary decoding (theorem 3.8)."""
    return expected_tokens(alpha, k) / round_cost(k, draft_cost)


def round_cost(k: float, draft_cost: float) -> float:
    """Return k c + 1, the modelled cost of a round in ordinary steps: k drafted positions and one forward."""
    _require(draft_cost >= 0, f"draft_cost is {draft_cost}; expected 0 or more")
    return k * draft_cost + 1


def operations_factor(alpha: float, k: float, draft_operations: float = 0.0) -> float:
    """Return how many times the arithmetic of ordinary decoding is done (theorem 3.11).

    `draft_operations` is their c-hat: operations per token of the draft / of the target.
    """
    return (k * draft_operations + k + 1) / expected_tokens(alpha, k)


def acceptance_for_tokens(tokens: float, k: int) -> float | None:
    """Return the alpha at which a round of `k` drafted tokens yields `tokens` in expectation.

    The inverse of `expected_tokens`, by bisection. 0 where one token or fewer is asked for, since every
    round yields one; None where more than k + 1 are, since no round yields that.
    """
    if tokens <= 1:
        return 0.0
    if tokens > k + 1:
        return None
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        if expected_tokens(middle, k) < tokens:
            low = middle
        else:
            high = middle
    return high


def break_even_acceptance(k: int, draft_cost: float) -> float | None:
    """Return the alpha at which drafting `k` tokens breaks even, or None where it always loses."""
    return acceptance_for_tokens(round_cost(k, draft_cost), k)


def best_k(alpha: float, draft_cost: float, largest: int = 32) -> int:
    """Return the k from 0 to `largest` with the highest predicted speedup; the smallest one on a tie.

    0 means that no draft pays.
    """
    return max(range(largest + 1), key=lambda k: predicted_speedup(alpha, k, draft_cost))


def round_cost_ratio(round_s: float, ordinary_s: float) -> float:
    """Return the seconds of a step of this strategy / the seconds of an ordinary step.

    It is also the break-even: speculation wins where tokens per target step exceed it.
    """
    _require(ordinary_s > 0, f"ordinary_s is {ordinary_s}; expected more than 0")
    return round_s / ordinary_s


def headroom(tokens_per_step: float, break_even_tokens: float) -> float:
    """Return tokens per target step / break-even - 1: above 0 speculation wins."""
    return speedup_from_steps(tokens_per_step, break_even_tokens) - 1


def speedup_from_steps(tokens_per_step: float, cost_ratio: float) -> float:
    """Return the speedup that tokens per target step and a round cost ratio amount to."""
    _require(cost_ratio > 0, f"the cost ratio is {cost_ratio}; expected more than 0")
    return tokens_per_step / cost_ratio


def implied_round_cost(tokens_per_step: float, speedup: float) -> float:
    """Return the round cost ratio behind a published mean of accepted tokens and its speedup."""
    _require(speedup > 0, f"the speedup is {speedup}; expected more than 0")
    return tokens_per_step / speedup


def seconds_per_token(round_s: float, tokens_per_step: float) -> float:
    """Return the seconds one output token takes."""
    _require(tokens_per_step > 0, f"tokens per step is {tokens_per_step}; expected more than 0")
    return round_s / tokens_per_step


def _require_acceptance(alpha: float) -> None:
    _require(0 <= alpha <= 1, f"alpha is {alpha}; expected a probability")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
