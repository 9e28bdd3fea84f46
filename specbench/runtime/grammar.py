"""Which tokens a grammar lets follow, for the target's window and while drafting.

llguidance does the parsing: it rolls back any number of tokens, and refuses a schema keyword that it cannot
enforce, where XGrammar 0.2.9 passes over `not`, `if`, `contains` and `uniqueItems`. It is one wheel of 3 MB
for every Python under the MIT licence, without dependencies (XGrammar wants torch, triton and TVM), and is
imported when the first grammar is read.

Under speculation a grammar is one more step of processing: in every row of the window the tokens it forbids
get probability 0, by that row's own ancestors. That alone is lossless, because verification then compares
laws that both respect it. What may be done with the drafts beside that depends on how they came about:

- A proposal that is a function of the prefix (n-grams, argmax of unmasked logits) may be *cut* at a token
  that the grammar forbids: q is a point mass, whether a position is drafted depends on the prefix alone, and
  the cut token would have been rejected anyway. `window_masks` says which nodes remain.
- A *sampled* draft must not be cut after it was drawn: whether position j is drafted would then depend on the
  token at j, which favours the tokens that survive. Mask the draft's logits instead, so that q is the law
  the token was drawn from; `DraftConstraint` gives the masks while a chain grows. Nothing is left to cut.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from specbench.errors import UsageError
from specbench.grammar import Grammar, parse_grammar, reason

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_SEARCH_STATES = 1024
_SEARCH_BRANCHES = 64


class GrammarCompiler:
    """Makes matchers for one tokenizer, parsing each grammar once.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: V, the rows of the model's output head; ids that the tokenizer lacks are never allowed.
        eos_ids: what is allowed when the text so far is complete; the only thing allowed once nothing else
            may follow.

    Raises:
        UsageError: there is no EOS, or the tokenizer cannot be read.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UsageError("grammars need a fast tokenizer", hint="use a model with a tokenizer.json")
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        ids = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        self._tokenizer = _tokenizer(backend, ids, self.eos_ids)
        octets = bytearray((ids + 31) // 32 * 4)
        for token in self.eos_ids:
            if token < vocab_size:
                octets[token // 8] |= 1 << token % 8
        self.eos_bits = torch.frombuffer(octets, dtype=torch.int32)
        self._compiled: dict[str, Matcher] = {}

    def matcher(self, text: str) -> Matcher:
        """Return a new matcher at the beginning of an answer.

        Raises:
            UsageError: as `parse_grammar`, or no text of the grammar can be written with this tokenizer.
        """
        if text not in self._compiled:
            self._compiled[text] = self._compile(parse_grammar(text))
        return self._compiled[text].fork()

    def allocate(self, rows: int) -> Tensor:
        """Return packed masks that allow everything, `[rows, W]` int32 on the CPU; see `unpack`."""
        return torch.full((rows, len(self.eos_bits)), -1, dtype=torch.int32)

    def _compile(self, grammar: Grammar) -> Matcher:
        matcher = self._start(grammar)
        if not self._can_finish(matcher):
            self._refuse(grammar, "any text of it")
        for choice in grammar.choices if len(grammar.choices) > 1 else ():
            if not self._can_finish(self._start(parse_grammar("choice:" + json.dumps([choice])))):
                self._refuse(grammar, shown(choice))
        return matcher

    def _start(self, grammar: Grammar) -> Matcher:
        from llguidance import LLMatcher

        return Matcher(self, grammar, LLMatcher(self._tokenizer, grammar.source, log_level=0))

    def _refuse(self, grammar: Grammar, what: str) -> NoReturn:
        raise UsageError(
            f"the grammar {shown(grammar.text)} does not fit the tokenizer, which cannot write {what}",
            hint="use characters that the model's vocabulary has, and a grammar that permits some text",
        )

    def _can_finish(self, start: Matcher) -> bool:
        """Whether some text of the grammar can be written, as far as a short search tells.

        The vocabulary may lack a byte that every text needs. The search ends in favour of the grammar where
        there are very many ways on, and after `_SEARCH_STATES` texts; a dead end met later fails in `fill`.
        """
        pending, seen = [(start, b"")], {b""}
        while pending:
            matcher, text = pending.pop()
            if matcher.is_accepting or len(seen) > _SEARCH_STATES:
                return True
            try:
                tokens = matcher.fork().allowed().nonzero().flatten().tolist()
            except UsageError:
                continue  # a dead end, where the fork that found it is of no more use
            if len(tokens) > _SEARCH_BRANCHES:
                return True
            for token in tokens:
                longer = text + bytes(self._tokenizer.decode_bytes([token]))
                if longer not in seen:
                    seen.add(longer)
                    child = matcher.fork()
                    child.accept(token)
                    pending.append((child, longer))
        return False


class Matcher:
    """How far one answer has come in its grammar; made by `GrammarCompiler.matcher`.

    A token is allowed if the text so far with its bytes appended begins some text of the grammar, and an
    EOS if the text so far is one. EOS counts as a token, and can be rolled back like any other.
    """

    def __init__(
        self, compiler: GrammarCompiler, grammar: Grammar, inner: LLMatcher, length: int = 0
    ) -> None:
        self.compiler = compiler
        self.grammar = grammar
        self.length = length
        self.is_finished = False
        """Whether an EOS was accepted, after which nothing is."""
        self._inner = inner

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far is a text of the grammar, so that EOS is allowed."""
        return self._inner.is_accepting()

    def accept(self, token: int) -> bool:
        """Advance by a token, or return False and stay if the grammar forbids it here."""
        if self.is_finished or not 0 <= token < self.compiler.vocab_size:
            return False
        if token in self.compiler.eos_ids:
            self.is_finished = self.is_accepting
            self.length += self.is_finished
            return self.is_finished
        taken = self._inner.try_consume_tokens([token]) == 1
        self.length += taken
        return taken

    def rollback(self, num: int) -> None:
        """Take back the last `num` accepted tokens."""
        if not 0 <= num <= self.length:
            raise ValueError(f"cannot take back {num} of {self.length} tokens")
        self.length -= num
        if num and self.is_finished:
            self.is_finished = False
            num -= 1
        if num and not self._inner.rollback(num):
            self._fail()

    def fork(self) -> Matcher:
        """Return a matcher at the same place that goes on by itself."""
        other = Matcher(self.compiler, self.grammar, self._inner.deep_copy(), self.length)
        other.is_finished = self.is_finished
        return other

    def fill(self, bits: Tensor) -> None:
        """Write what is allowed next into one row `[W]` of packed masks.

        After an EOS only EOS is: nothing is emitted there, but the row of a window needs some law.

        Raises:
            UsageError: no token of the vocabulary leads on from here, or the grammar is too complex.
        """
        if not (bits.is_contiguous() and bits.dtype == torch.int32 and bits.device.type == "cpu"):
            raise ValueError("packed masks are written into contiguous int32 memory of the CPU")
        if not self.is_finished:
            self._inner.unsafe_compute_mask_ptr(bits.data_ptr(), 4 * bits.numel())
            if not self.is_accepting:
                if self._inner.is_stopped() or not bool(bits.any()):
                    self._fail()
                return
            bits |= self.compiler.eos_bits
        else:
            bits.copy_(self.compiler.eos_bits)

    def allowed(self) -> Tensor:
        """Return the tokens that are allowed next, `[V]` bool; raises as `fill`."""
        bits = self.compiler.allocate(1)
        self.fill(bits[0])
        return unpack(bits, self.compiler.vocab_size)[0]

    def _fail(self) -> None:
        why = "no token of the vocabulary leads on from here"
        if self._inner.is_error() and self._inner.stop_reason() not in ("InternalError", "NoExtensionBias"):
            why = reason(self._inner.get_error()) or self._inner.stop_reason()
        raise UsageError(
            f"the grammar {shown(self.grammar.text)} failed after {self.length} tokens: {why}",
            hint="use characters that the model's vocabulary has, or a simpler grammar",
        )


def unpack(bits: Tensor, vocab_size: int) -> Tensor:
    """Turn packed masks `[..., W]` int32 into `[..., V]` bool, on whichever device they are.

    Bit i of a row, counted from the low end of its first byte, stands for token i. Send the packed masks to
    a device, and unpack them there.
    """
    octets = bits.contiguous().view(torch.uint8).int()
    return _octet_bools(bits.device)[octets].view(torch.bool)[..., :vocab_size]


@functools.cache
def _octet_bools(device: torch.device) -> Tensor:
    """Return the eight bools of each byte, read as one int64: a single look-up unpacks a byte, `[256]`."""
    octets = torch.arange(256, device=device)
    bools = (octets[:, None] >> torch.arange(8, device=device)) & 1 != 0
    return bools.view(torch.int64).flatten()


def fill_rows(matchers: Sequence[Matcher | None], bits: Tensor) -> None:
    """Write what each matcher allows next into its row of `bits` `[B, W]`; rows without one keep theirs."""
    for matcher, row in zip(matchers, bits, strict=True):
        if matcher is not None:
            matcher.fill(row)


def window_masks(
    matcher: Matcher, nodes: Sequence[int], parents: Sequence[int], bits: Tensor | None = None
) -> tuple[list[int], Tensor]:
    """Return which nodes of one request's proposal the grammar allows, and the masks of its window.

    Args:
        matcher: after the last committed token; it is left there.
        nodes: the draft tokens, N of them.
        parents: each node's parent, an earlier node or -1; a chain is -1, 0, 1, …
        bits: packed masks `[N + 1, W]` to write into, which allow everything; made if None.

    Returns:
        The indices of the allowed nodes in order (a node under a forbidden one is forbidden), and the packed
        masks: row 0 follows the last committed token, row i + 1 follows node i. Rows of forbidden nodes are
        not written: no acceptance reaches them, whether or not the nodes are taken out, since the mask of
        the parent's row gives such a node probability 0.
    """
    if bits is None:
        bits = matcher.compiler.allocate(len(nodes) + 1)
    children: list[list[int]] = [[] for _ in range(len(nodes) + 1)]
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} has the parent {parent}, which does not come before it")
        children[parent + 1].append(node)
    start = matcher.length
    kept: list[int] = []
    matcher.fill(bits[0])
    # Depth first, so that a chain is one walk forward; (depth of the parent, node).
    pending = [(0, node) for node in reversed(children[0])]
    while pending:
        depth, node = pending.pop()
        matcher.rollback(matcher.length - start - depth)
        if matcher.accept(nodes[node]):
            matcher.fill(bits[node + 1])
            kept.append(node)
            pending += [(depth + 1, child) for child in reversed(children[node + 1])]
    matcher.rollback(matcher.length - start)
    return sorted(kept), bits


class DraftConstraint:
    """Keeps the drafts of a batch within its grammars while a chain is sampled token by token.

    At each depth mask the draft's logits with `masks()`, sample, `advance` by what was drawn, and once the
    chain is complete `restore()` the matchers to the committed text, where verification expects them. The law
    after masking is the q to report. (For a tree, ask `window_masks` for the rows of the nodes so far.)

    Args:
        compiler: what made the matchers.
        matchers: one per row; None for a row without a grammar.
    """

    def __init__(self, compiler: GrammarCompiler, matchers: Sequence[Matcher | None]) -> None:
        self.compiler = compiler
        self.matchers = matchers
        self._bits = compiler.allocate(len(matchers))
        self._starts = [0 if matcher is None else matcher.length for matcher in matchers]

    def masks(self) -> Tensor:
        """Return what each row may draft next, `[B, V]` bool on the CPU; everything without a grammar."""
        fill_rows(self.matchers, self._bits)
        return unpack(self._bits, self.compiler.vocab_size)

    def advance(self, tokens: Sequence[int | None]) -> None:
        """Follow each row by the token it drafted; None, and all that comes after an EOS, is passed over.

        Raises:
            ValueError: a token is one that `masks` forbade: the logits were not masked.
        """
        for row, (matcher, token) in enumerate(zip(self.matchers, tokens, strict=True)):
            if matcher is None or token is None or matcher.is_finished:
                continue
            if not matcher.accept(token):
                raise ValueError(f"row {row} drafted token {token}, which its grammar forbids there")

    def restore(self) -> None:
        """Take back every drafted token."""
        for matcher, start in zip(self.matchers, self._starts, strict=True):
            if matcher is not None:
                matcher.rollback(matcher.length - start)


def shown(text: str) -> str:
    """Return a grammar as it is quoted in a message: on one line, and not too long."""
    line = " ".join(text.split())
    return f"'{line if len(line) <= 60 else line[:57] + '...'}'"


def _tokenizer(backend: Any, ids: int, eos_ids: frozenset[int]) -> LLTokenizer:
    """Read a tokenizer of the tokenizers library."""
    from llguidance import LLTokenizer

    size = backend.get_vocab_size(with_added_tokens=True)
    known = sorted(token for token in eos_ids if token < size)
    if not known:  # llguidance would take one of its own choice
        raise UsageError(
            "a grammar needs an end-of-sequence token to finish with, and there is none in the tokenizer",
            hint="leave the grammar out, or use a model that has one",
        )
    try:
        return LLTokenizer(backend.to_str(), n_vocab=ids, eos_token=known)
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"grammars cannot be used with this tokenizer: {reason(str(error))}",
            hint="byte-level BPE and SentencePiece with byte fallback are supported",
        ) from None
