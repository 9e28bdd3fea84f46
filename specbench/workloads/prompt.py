"""One prompt, and how it becomes token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from specbench.errors import WorkloadError


class Message(TypedDict):
    """One turn of a chat, in the shape that chat templates and HTTP engines expect."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: either a text to continue or the messages of a chat that ends with the user's turn.

    `max_new_tokens` overrides the workload's value when it is not None. `grammar` constrains the answer, in
    the form that `specbench.grammar` describes.
    """

    id: str
    category: str
    domain: str
    text: str | None = None
    messages: tuple[Message, ...] | None = field(default=None, hash=False)
    max_new_tokens: int | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise WorkloadError(f"prompt '{self.id}' needs either text or messages, and not both")

    @property
    def plain(self) -> str:
        """The prompt as one string: the text as it is, or each message followed by an empty line."""
        if self.messages is None:
            return self.text or ""
        return "".join(message["content"] + "\n\n" for message in self.messages)

    def render(self, tokenizer: Any, *, chat: bool = True) -> list[int]:
        """Return the token ids that an engine is given.

        Messages go through the tokenizer's chat template, up to the point where the assistant would
        begin to speak. With `chat=False`, or for a tokenizer without a template (a base model), they
        are concatenated as in `plain`. A text is never wrapped in a template.

        Raises:
            WorkloadError: The chat template refuses the messages (some accept no system role).
        """
        if self.messages is None or not chat or not getattr(tokenizer, "chat_template", None):
            return _token_ids(tokenizer(self.plain))
        from jinja2 import TemplateError

        try:
            # return_dict changed its default in transformers 5; asked for explicitly, both agree.
            encoded = tokenizer.apply_chat_template(
                [dict(message) for message in self.messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except TemplateError as error:
            raise WorkloadError(
                f"the tokenizer's chat template refuses prompt '{self.id}': {error}",
                hint="many templates accept no system role, or want user and assistant to alternate",
            ) from error
        return _token_ids(encoded)


def _token_ids(encoded: Any) -> list[int]:
    """Reduce what tokenizers return (ids, a batch of one, a mapping, an Encoding) to a list of ids."""
    if isinstance(encoded, Mapping):  # BatchEncoding is one too
        encoded = encoded["input_ids"]
    ids = getattr(encoded, "ids", encoded)
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if ids and not hasattr(ids[0], "__index__"):  # a batch of one
        return _token_ids(ids[0])
    return [int(token) for token in ids]
