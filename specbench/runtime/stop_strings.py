"""Stop strings over tokens: detokenised as they are committed, found across chunk and token edges.

Text grows by what a token adds in the context of the tokens before it (a token may hold part of a
character, and many tokenizers decode a leading space by context), as vLLM and TGI detokenise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens kept."""

_CONTEXT_TOKENS = 6
_UNFINISHED = "\ufffd"  # what an incomplete character decodes to


class StopStrings:
    """Watches the output of one request; a `commit.StopChecker`.

    A string counts from the output's own text only: one that begins in the prompt is not found, as in
    vLLM and OpenAI's API (transformers' `generate` would find it).

    Args:
        stops: what to look for.
        decode: see `Decode`.
        prompt: the prompt, as context for the first token.
        min_tokens: output tokens before which nothing is looked for.
    """

    def __init__(
        self, stops: Sequence[str], decode: Decode, prompt: Sequence[int], *, min_tokens: int = 0
    ) -> None:
        self.stops = stops
        self.decode = decode
        self.min_tokens = min_tokens
        self.longest = max(map(len, stops))
        self.tokens = list(prompt[-_CONTEXT_TOKENS:])
        self.settled = 0  # tokens before this one are needed no more, not even as context
        self.read = len(self.tokens)  # tokens whose text has been seen
        self.produced = 0
        self.tail = ""

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """Take in committed tokens; return how many to keep if a stop string ends among them."""
        for index, token in enumerate(tokens):
            added = self._text_of(token)
            window = self.tail + added
            self.produced += 1
            # Only what ends in the new text is new; the tail is too short to hold a whole stop string.
            if self.produced >= self.min_tokens and any(stop in window for stop in self.stops):
                return index + 1
            self.tail = window[-(self.longest - 1) :] if self.longest > 1 else ""
        return None

    def _text_of(self, token: int) -> str:
        """Return the text that a token adds; nothing while a character is incomplete."""
        self.tokens.append(token)
        before = self.decode(self.tokens[self.settled : self.read])
        after = self.decode(self.tokens[self.settled :])
        if after.endswith(_UNFINISHED):
            return ""
        self.settled, self.read = self.read, len(self.tokens)
        return after[len(before) :]
