"""How a row of somebody's data becomes a `Prompt`, and every way in which it can fail to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from specbench.errors import UsageError, WorkloadError, did_you_mean
from specbench.grammar import parse_grammar
from specbench.workloads.prompt import Message, Prompt

ROLES = ("system", "user", "assistant")
CONTENT = ("prompt", "messages", "turns")
_HINT = 'a row looks like {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


def fail(where: str, what: str, hint: str | None = _HINT) -> NoReturn:
    """Raise the error for one row or file, on one line."""
    raise WorkloadError(f"{where}: {' '.join(what.split())}", hint=hint)


def prompts_from(rows: Iterable[tuple[str, str, Any]]) -> tuple[Prompt, ...]:
    """Turn rows, given as (where, default id, value), into prompts with distinct ids."""
    prompts: dict[str, Prompt] = {}
    first: dict[str, str] = {}
    for where, default_id, value in rows:
        prompt = prompt_from(where, default_id, value)
        if prompt.id in prompts:
            fail(
                where,
                f"the id '{prompt.id}' was already used at {first[prompt.id]}",
                "give every row its own id",
            )
        prompts[prompt.id], first[prompt.id] = prompt, where
    return tuple(prompts.values())


def prompt_from(where: str, default_id: str, row: Any) -> Prompt:
    """Make a prompt from one row; keys that mean nothing to us are allowed and ignored."""
    if not isinstance(row, Mapping):
        fail(where, f"expected an object, found {_kind(row)}")
    given = [key for key in CONTENT if row.get(key) is not None]
    if not given:
        near = next(filter(None, (did_you_mean(str(key), CONTENT) for key in row)), "")
        fail(where, f"needs 'prompt', 'messages' or 'turns', found only {sorted(map(str, row))}{near}")
    if len(given) > 1:
        fail(where, f"has both '{given[0]}' and '{given[1]}'; a prompt is one or the other")
    text, messages = None, None
    if given == ["prompt"]:
        text = _text(where, "'prompt'", row["prompt"])
    elif given == ["messages"]:
        messages = _messages(where, row["messages"])
    else:
        messages = _first_turn(where, row["turns"])
    return Prompt(
        id=_identity(where, row, default_id),
        category=_label(where, row, "category", "uncategorised"),
        domain=_label(where, row, "domain", "general"),
        text=text,
        messages=messages,
        max_new_tokens=_budget(where, row.get("max_new_tokens")),
        grammar=_grammar(where, row.get("grammar")),
    )


def _text(where: str, what: str, value: Any) -> str:
    if not isinstance(value, str):
        fail(where, f"{what} must be a string, not {_kind(value)}")
    if not value.strip():
        fail(where, f"{what} is empty", "remove the row or give it some text")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, tokenizers cannot read it
        fail(where, f"{what} holds half of a surrogate pair, which is not text", "write the character itself")
    return value


def _messages(where: str, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        fail(where, f"'messages' must be a list, not {_kind(value)}")
    messages = []
    for number, message in enumerate(value, start=1):
        name = f"message {number}"
        if not isinstance(message, Mapping):
            fail(where, f"{name} must be an object with 'role' and 'content', not {_kind(message)}")
        role = message.get("role")
        if role not in ROLES:
            near = did_you_mean(str(role), ROLES)
            fail(where, f"{name} has the role {role!r}{near}", f"roles are {', '.join(ROLES)}")
        messages.append(
            Message(role=role, content=_text(where, f"the content of {name}", message.get("content")))
        )
    if not messages:
        fail(where, "'messages' is empty")
    if messages[-1]["role"] != "user":
        fail(
            where,
            f"the last message is from the {messages[-1]['role']}, so there is nothing to answer",
            "end the messages with a user's turn",
        )
    return tuple(messages)


def _first_turn(where: str, value: Any) -> tuple[Message, ...]:
    """Read Spec-Bench's `turns`: the first is asked, the others depend on an answer we do not have."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        fail(where, f"'turns' must be a list of strings, not {_kind(value)}")
    if not value:
        fail(where, "'turns' is empty")
    return (Message(role="user", content=_text(where, "the first of 'turns'", value[0])),)


def _identity(where: str, row: Mapping[Any, Any], default: str) -> str:
    for key in ("id", "question_id"):
        value = row.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
            fail(
                where, f"'{key}' must be a string or a whole number, not {_kind(value)}", "name each row once"
            )
        return str(value).strip()
    return default


def _label(where: str, row: Mapping[Any, Any], key: str, default: str) -> str:
    value = row.get(key)
    if value is None:
        return default
    if not isinstance(value, str) or not value.strip():
        fail(where, f"'{key}' must be a word, not {_kind(value)}", f"leave '{key}' out if there is none")
    return value.strip()


def _budget(where: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        fail(
            where,
            f"'max_new_tokens' must be a whole number from 1, not {value!r}",
            "leave it out for the default",
        )
    return value


def _grammar(where: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        hint = 'write the kind and the grammar in one string, as in "grammar": "regex:[0-9]+"'
        fail(where, f"'grammar' must be a string, not {_kind(value)}", hint)
    try:
        return parse_grammar(value).text
    except UsageError as error:
        fail(where, error.message, error.hint)


def _kind(value: Any) -> str:
    """Name the type of a JSON value as JSON does."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        return "a string" if value.strip() else "an empty string"
    if isinstance(value, int | float):
        return "a number"
    return "an object" if isinstance(value, Mapping) else "a list"
