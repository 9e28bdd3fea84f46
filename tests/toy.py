"""A target and a draft as tables, so that every probability is exact and tests compare with the truth.

`decode` is a whole speculative decoder made of `specbench.decoding` alone. `emitted_law` needs no random
numbers: it adds up everything that a verification rule can do.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.audit.chi_squared import ExpectedTable
from specbench.decoding.commit import Committed, Limits, commit
from specbench.decoding.distribution import Distribution
from specbench.decoding.processing import SamplingTensors, process
from specbench.decoding.random_numbers import Purpose, RoundRandom, stream_keys
from specbench.decoding.verification import Proposal, RejectionSampling, Rule
from specbench.records import EndedBy, Request


@dataclass(frozen=True)
class Toy:
    """A language model of 3 to 5 tokens: `logits[a, b]` `[V]` float64 follow a context that ends in a, b."""

    logits: Tensor

    @classmethod
    def random(cls, vocab: int, seed: int, spread: float = 1.0) -> Toy:
        """Draw a table whose rows are all different."""
        generator = torch.Generator().manual_seed(seed)
        return cls(spread * torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64))

    def blurred(self, scale: float, seed: int) -> Toy:
        """Return a draft for this target: the same logits with noise of that size."""
        return Toy(self.logits + Toy.random(self.vocab, seed, scale).logits)

    @property
    def vocab(self) -> int:
        """Return V."""
        return self.logits.shape[-1]

    @property
    def probs(self) -> Tensor:
        """Return the probabilities at temperature 1, `[V, V, V]`."""
        return self.logits.softmax(-1)

    def after(self, tokens: Tensor) -> Tensor:
        """Return the logits after each token but the first of `tokens` `[..., n]`: `[..., n - 1, V]`."""
        return self.logits[tokens[..., :-1], tokens[..., 1:]]

    def exact_law(
        self, prompt: Sequence[int], horizon: int, eos_ids: frozenset[int] = frozenset()
    ) -> ExpectedTable:
        """Return the law at temperature 1 of whole continuations of up to `horizon` tokens."""
        law: dict[tuple[int, ...], float] = {(): 1.0}
        probs = self.probs.tolist()
        for _ in range(horizon):
            grown: dict[tuple[int, ...], float] = {}
            for tokens, mass in law.items():
                if tokens and tokens[-1] in eos_ids:
                    grown[tokens] = mass
                    continue
                a, b = (*prompt, *tokens)[-2:]
                grown |= {(*tokens, token): mass * probs[a][b][token] for token in range(self.vocab)}
            law = grown
        return ExpectedTable(law)


@dataclass(frozen=True)
class Output:
    """What one request got: its tokens, what ended it, and (drafted, accepted) of every round."""

    tokens: tuple[int, ...]
    ended_by: EndedBy
    rounds: tuple[tuple[int, int], ...]


def decode(
    target: Toy,
    draft: Toy,
    rule: Rule,
    requests: Sequence[Request],
    lengths: int | Sequence[int],
    eos_ids: frozenset[int] = frozenset(),
) -> list[Output]:
    """Decode a batch speculatively, drafting up to `lengths[b]` tokens a round for request b (0: ordinary).

    A table has nothing to prefill, so the first round drafts already. Rows that have ended stay in the
    batch, with nothing offered and no budget left.
    """
    ks = [lengths] * len(requests) if isinstance(lengths, int) else list(lengths)
    sampling = SamplingTensors.of([request.sampling for request in requests])
    keys = stream_keys([request.sampling.seed for request in requests])
    outputs: list[list[int]] = [[] for _ in requests]
    budgets = [request.sampling.max_new_tokens for request in requests]
    stops = [frozenset(request.sampling.stop_token_ids) for request in requests]
    ends: list[frozenset[int]] = [
        frozenset() if request.sampling.ignore_eos else eos_ids for request in requests
    ]
    ended: list[EndedBy] = ["none"] * len(requests)
    counts: list[list[tuple[int, int]]] = [[] for _ in requests]
    last_two = torch.tensor([request.prompt[-2:] for request in requests])
    for number in itertools.count():
        if "none" not in ended:
            break
        remaining = [
            budget - len(output) if end == "none" else 0
            for budget, output, end in zip(budgets, outputs, ended, strict=True)
        ]
        offered = [max(0, min(k, left - 1)) for k, left in zip(ks, remaining, strict=True)]
        random = RoundRandom(
            keys,
            torch.tensor([len(output) for output in outputs]),
            torch.full((len(requests),), number),
        )
        proposal, tokens = _draft(draft, last_two, offered, sampling, random)
        acceptance = rule.verify(process(target.after(tokens), sampling), proposal, random)
        decided = zip(
            acceptance.accepted.tolist(),
            acceptance.next_token.tolist(),
            proposal.tokens.tolist(),
            strict=True,
        )
        for row, (accepted, next_token, drafted) in enumerate(decided):
            if ended[row] != "none":
                continue
            limits = Limits(remaining[row], ends[row], stops[row])
            result: Committed = commit(drafted[:accepted], next_token, limits)
            outputs[row] += result.tokens
            ended[row] = result.ended_by
            counts[row].append((offered[row], accepted))
        heads = [(*request.prompt[-2:], *out)[-2:] for request, out in zip(requests, outputs, strict=True)]
        last_two = torch.tensor(heads)
    return [
        Output(tuple(output), end, tuple(rounds))
        for output, end, rounds in zip(outputs, ended, counts, strict=True)
    ]


def _draft(
    draft: Toy, last_two: Tensor, offered: Sequence[int], sampling: SamplingTensors, random: RoundRandom
) -> tuple[Proposal, Tensor]:
    """Draw a chain for every row; also return the context with it, `[B, 2 + N]`."""
    width = max(offered)
    if width == 0:
        return Proposal.empty(len(offered)), last_two
    uniforms = random.uniform(Purpose.DRAFT, width)
    tokens, laws = last_two, []
    for place in range(width):
        law = process(draft.after(tokens[:, -2:]), sampling)
        laws.append(law)
        tokens = torch.cat([tokens, law.sample(uniforms[:, place : place + 1])], 1)
    chain = tokens[:, 2:]
    dense = [law.probs for law in laws if law.probs is not None]
    q = Distribution.dense(torch.cat(dense, 1)) if dense else Distribution.point(chain)
    return Proposal.chains(chain, offered, q), tokens


# Exact laws, for every context at once. A context is numbered a * V + b; continuations of n tokens are
# numbered by their digits in base V, so a law of them is a tensor [V * V, V ** n].


def histories(vocab: int, num: int) -> Tensor:
    """Return every context followed by every continuation of `num` tokens, `[V * V * V ** num, 2 + num]`."""
    return torch.cartesian_prod(*[torch.arange(vocab)] * (2 + num))


def ordinary_law(probs: Tensor, horizon: int) -> Tensor:
    """Return the law of continuations when every token is drawn from `probs` `[V, V, V]`."""
    vocab = probs.shape[-1]
    tokens = histories(vocab, horizon)
    steps = [probs[tokens[:, i], tokens[:, i + 1], tokens[:, i + 2]] for i in range(horizon)]
    return torch.stack(steps).prod(0).reshape(vocab**2, -1)


def emitted_law(rule: RejectionSampling, p: Tensor, q: Tensor, k: int, horizon: int) -> Tensor:
    """Return the law of continuations that a rule emits, drafting k tokens in every round.

    Args:
        rule: Rejection sampling, or a fault of it.
        p: The target's probabilities, `[V, V, V]`.
        q: The draft's.
        k: Tokens drafted in every round.
        horizon: Where continuations are cut, which may be in the middle of a round.
    """
    return chain_rounds(round_law(rule, p, q, k), horizon)


def total_variation(one: Tensor, other: Tensor) -> Tensor:
    """Return the distance of two laws in every context, `[V * V]`."""
    return (one - other).abs().sum(1) / 2


def round_law(rule: RejectionSampling, p: Tensor, q: Tensor, k: int, form: str = "dense") -> list[Tensor]:
    """Return the law of what one round emits: for n = 1 to k + 1, `[V * V, V ** n]`, all n together sum to 1.

    Coins fall into k + 1 regions: all drafts kept, or the first one not kept is number i. Each region has a
    known probability and is judged by one coin inside of it.
    """
    vocab = p.shape[-1]
    tokens = histories(vocab, k)
    p_rows = p[tokens[:, :-1], tokens[:, 1:]]
    q_rows = q[tokens[:, :-1], tokens[:, 1:]][:, :k]
    drafts = tokens[:, 2:]
    p_draft = p_rows[:, :k].gather(-1, drafts[..., None]).squeeze(-1)
    q_draft = q_rows.gather(-1, drafts[..., None]).squeeze(-1)
    drawn = q_draft.prod(1)
    keep = torch.where(q_draft > 0, p_draft / q_draft, 1.0).clamp(max=1.0)
    emitted = [torch.zeros(vocab ** (2 + n), vocab, dtype=torch.float64) for n in range(k + 1)]
    for stop in range(k + 1):
        coins = just_below(keep)
        weight = drawn * keep[:, :stop].prod(1)
        if stop < k:
            coins[:, stop] = just_above(keep[:, stop])
            weight = weight * (1 - keep[:, stop])
        possible = weight > 0
        rows = int(possible.sum())
        chains, target = drafts[possible], Distribution.dense(p_rows[possible])
        law_of_draft = Distribution.dense(q_rows[possible])
        if form == "point":
            law_of_draft = Distribution.point(law_of_draft.probs.argmax(-1))
        proposal = Proposal.chains(chains, [k] * rows, law_of_draft)
        accepted, rejected = rule.decide(target, proposal, coins[possible])
        law = rule.next_law(target, proposal, accepted, rejected).to_dense(vocab, torch.float64)
        law = weight[possible, None] * law / law.sum(-1, keepdim=True)
        for n in range(k + 1):
            here = accepted == n
            numbers = number_of(tokens[possible][here, : 2 + n], vocab)
            emitted[n].index_add_(0, numbers, law[here])
    return [law.reshape(vocab**2, -1) for law in emitted]


def chain_rounds(rounds: Sequence[Tensor], horizon: int) -> Tensor:
    """Return the law of continuations of `horizon` tokens, from that of what one round emits."""
    contexts = rounds[0].shape[0]
    vocab = rounds[0].shape[1]
    laws = [torch.ones(contexts, 1, dtype=torch.float64)]
    for length in range(1, horizon + 1):
        law = torch.zeros(contexts, vocab**length, dtype=torch.float64)
        for n, emitted in enumerate(rounds, start=1):
            if n >= length:
                law += emitted.reshape(contexts, vocab**length, -1).sum(-1)
            else:
                following = number_of(histories(vocab, n)[:, -2:], vocab).reshape(contexts, -1)
                law += (emitted[..., None] * laws[length - n][following]).reshape(contexts, -1)
        laws.append(law)
    return laws[-1]


def number_of(tokens: Tensor, vocab: int) -> Tensor:
    """Read each row of tokens as a number in base V."""
    powers = vocab ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return (tokens * powers).sum(1)


def just_below(keep: Tensor) -> Tensor:
    """Return coins that must accept, as near to the edge as rounding allows; they stay inside (0, 1)."""
    return (keep * (1 - 1e-14)).clamp(min=2.0**-53)


def just_above(keep: Tensor) -> Tensor:
    """Return coins that must reject where `keep` is below 1; they stay inside (0, 1)."""
    return (keep * (1 + 1e-14)).clamp(2.0**-53, 1 - 2.0**-53)
