"""Make the workloads whose answers are constrained: `structured`, and `tiny-structured` for the bundled pair.

    python tools/make_structured_workloads.py

Every prompt carries a grammar (`specbench/grammar.py`) and was made together with an answer that the grammar
permits; the answers stay here, for the tests. Strings and lists are bounded, so that an answer ends within
its budget whatever a model writes. Records come from the schemas of `make_workloads.py`, free text from
`workload_texts/structured.txt`, the tasks of the bundled pair from `tiny_corpus.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import make_workloads as base
import tiny_corpus as corpus

TEXT = {"type": "string", "minLength": 1, "maxLength": 24}
TYPES: dict[str, dict[str, Any]] = {
    "text": TEXT,
    "count": {"type": "integer", "minimum": 0, "maximum": 99_999},
    "flag": {"type": "boolean"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"},
    "money": {"type": "string", "pattern": "^[0-9]{1,4}\\.[0-9]{2}$"},
    "code": {"type": "string", "pattern": "^[A-Z]{1,3}-[0-9]{2,5}$"},
}
FORMS = {"date": "YYYY-MM-DD", "time": "HH:MM", "flag": "true or false", "money": "0.00"}
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
TOOLS = {
    "rail": {
        "find_trains": "origin text; destination text; day date; after? time",
        "seat": "train code; carriage of quiet, family, bicycle; window flag",
        "refund": "ticket code; reason of cancelled, late, unused",
    },
    "table": {
        "reserve": "name text; day date; time time; guests count",
        "cancel": "booking code",
        "menu": "day date; diet of any, vegetarian, vegan",
    },
    "climate": {
        "forecast": "place text; days count",
        "alert": "place text; kind of wind, rain, frost, heat; above count",
        "history": "place text; day date",
    },
    "bank": {
        "transfer": "account code; amount money; note? text",
        "freeze": "card code; reason of lost, stolen, damaged",
        "statement": f"account code; month of {', '.join(MONTHS)}",
    },
    "parcel": {
        "track": "parcel code",
        "pickup": "day date; parcels count; size of small, medium, large",
        "redirect": "parcel code; address text",
    },
    "tickets": {
        "open_ticket": "title text; severity of low, medium, high; build code",
        "assign": "ticket code; person text",
        "close_ticket": "ticket code; resolution of fixed, duplicate, declined",
    },
}


@dataclass(frozen=True)
class Constrained(base.Draft):
    """A prompt with the grammar of its answer, and one answer that the grammar permits."""

    grammar: str
    answer: str


# --- schemas ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """One property: its name, its type or options, and whether it may be left out."""

    name: str
    kind: str
    options: tuple[str, ...]
    optional: bool

    @property
    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the value."""
        return {"enum": list(self.options)} if self.options else TYPES[self.kind]

    @property
    def said(self) -> str:
        """Return the field as a prompt names it."""
        options = f" ({', '.join(self.options[:-1])} or {self.options[-1]})" if self.options else ""
        return self.name + options + (" (if it is known)" if self.optional else "")

    @property
    def argument(self) -> str:
        """Return the field as the signature of a function shows it."""
        form = " or ".join(self.options) if len(self.options) < 6 else "the month"
        form = form if self.options else FORMS.get(self.kind, "")
        return self.name + ("?" if self.optional else "") + (f": {form}" if form else "")


def fields(text: str) -> list[Field]:
    """Read fields, as in `day date; after? time; size of small, large`."""
    found = []
    for part in text.split("; "):
        name, kind = part.split(" ", 1)
        options = tuple(kind[3:].split(", ")) if kind.startswith("of ") else ()
        found.append(Field(name.rstrip("?"), kind, options, name.endswith("?")))
    return found


def object_of(properties: dict[str, Any], optional: Sequence[str] = ()) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def object_with(listed: Sequence[Field]) -> dict[str, Any]:
    """Return the schema of an object with these fields."""
    return object_of(
        {each.name: each.schema for each in listed}, [each.name for each in listed if each.optional]
    )


def listing(words: Sequence[str]) -> str:
    """Join words as a sentence does."""
    return ", ".join(words[:-1]) + " and " + words[-1]


# --- the workload for real models -------------------------------------------------------------


def user(category: str, domain: str, content: str, grammar: str, answer: str) -> Constrained:
    """Make a prompt of one user message."""
    return Constrained(category, domain, [{"role": "user", "content": content}], grammar, answer)


def record(number: int, header: list[str], body: str) -> Constrained:
    """Ask for one record as an object: `=== record | schema | fields`."""
    name, columns = header
    rng = Random(f"record {number}")
    schema, listed = base.SCHEMAS[name], fields(columns)
    rows = schema.rows(rng, 1)
    content = body.format(data=base.as_prose(schema, rng, rows), keys=listing([each.said for each in listed]))
    answer = json.dumps({each.name: rows[0][each.name] for each in listed})
    return user("record", schema.domain, content, "json:" + json.dumps(object_with(listed)), answer)


def records(number: int, header: list[str], body: str) -> Constrained:
    """Ask for a list of records: `=== records | schema | key of the list or - | number | fields`."""
    name, key, count, columns = header
    rng = Random(f"records {number}")
    schema, listed = base.SCHEMAS[name], fields(columns)
    rows = schema.rows(rng, int(count))
    content = body.format(data=base.as_prose(schema, rng, rows), keys=listing([each.said for each in listed]))
    value: Any = [{each.name: row[each.name] for each in listed} for row in rows]
    shape: dict[str, Any] = {"type": "array", "items": object_with(listed), "minItems": 1, "maxItems": 4}
    if key != "-":
        value, shape = {key: value}, object_of({key: shape})
    return user("records", schema.domain, content, "json:" + json.dumps(shape), json.dumps(value))


def call(number: int, header: list[str], body: str) -> Constrained:
    """Ask for a function call: `=== call | domain | tools | function | arguments`."""
    domain, tools, function, arguments = header
    fill = filler(Random(f"call {number}"))
    signatures = {name: fields(text) for name, text in TOOLS[tools].items()}
    lines = [f"{name}({', '.join(e.argument for e in listed)})" for name, listed in signatures.items()]
    content = (
        f"{fill(body)}\n\nAnswer with one function call, as JSON with name and arguments. Functions:\n"
        + "\n".join(lines)
    )
    shapes = [
        object_of({"name": {"const": name}, "arguments": object_with(listed)})
        for name, listed in signatures.items()
    ]
    answer = json.dumps({"name": function, "arguments": json.loads(fill(arguments))})
    return user("call", domain, content, "json:" + json.dumps({"anyOf": shapes}), answer)


def choice(number: int, header: list[str], body: str) -> Constrained:
    """Ask for one of several labels: `=== choice | domain | labels | answer`."""
    domain, labels, answer = header
    listed = base.shuffled(Random(f"choice {number}"), labels.split(", "))
    content = f"{body}\n\nAnswer with one of: {', '.join(listed)}."
    return user("choice", domain, content, "choice:" + json.dumps(listed), answer)


def pattern(number: int, header: list[str], body: str) -> Constrained:
    """Ask for a value in a fixed notation: `=== pattern | domain | expression | answer`."""
    domain, expression, answer = header
    fill = filler(Random(f"pattern {number}"))
    return user("pattern", domain, fill(body), "regex:" + expression, fill(answer))


MAKERS: dict[str, Callable[[int, list[str], str], Constrained]] = {
    "record": record,
    "records": records,
    "call": call,
    "choice": choice,
    "pattern": pattern,
}


def filler(rng: Random) -> Callable[[str], str]:
    """Draw a value for each `<name>` that the texts use, and return what fills them in."""
    day, month = base.pick(rng, range(1, 29)), base.pick(rng, range(12))
    hour, minute = base.pick(rng, range(6, 10)), base.pick(rng, range(10, 60))
    values = {
        "day": str(day),
        "day2": f"{day:02}",
        "month": MONTHS[month],
        "month2": f"{month + 1:02}",
        "hour": str(hour),
        "hour2": f"{hour:02}",
        "evening2": str(hour + 12),
        "minute": str(minute),
        "minute2": str(minute),
        "few": str(base.pick(rng, range(2, 10))),
        "two": str(base.pick(rng, range(20, 100))),
        "four": str(base.pick(rng, range(1000, 10_000))),
    }
    return lambda text: re.sub(r"<([a-z]+2?)>", lambda found: values[found[1]], text)


def structured() -> list[Constrained]:
    """Make the prompts for real models."""
    return [
        MAKERS[kind](number, header, body)
        for number, ((kind, *header), body) in enumerate(base.blocks("structured.txt"))
    ]


# --- the workload for the bundled pair --------------------------------------------------------

TINY_EACH = 17
TINY_SEED = corpus.HELD_OUT_SEED + 400_000
TINY_KINDS = ("to-json", "to-list", "route", "number", "contains")
MOST_CHARACTERS = 110
"""Of an answer of the bundled pair: some 60 of its tokens."""
PAIR = "[a-z]{3,7} [a-z]{3,7}"
TINY_FIELDS: dict[str, dict[str, Any]] = {
    "name": TEXT,
    "city": {"type": "string", "minLength": 1, "maxLength": 10},
    "item": {"type": "string", "minLength": 1, "maxLength": 16},
    "order": {"type": "integer", "minimum": 1000, "maximum": 99_999},
    "status": {"enum": corpus.STATUS},
    "amount": {"type": "integer", "minimum": 1, "maximum": 40},
}


def tiny_grammar(kind: str, answer: str) -> str | None:
    """Return the grammar of a task's answer, or None where it has none: more than one record."""
    if kind == "to-json":
        if "\n" in answer:
            return None
        return "json:" + json.dumps(object_of({name: TINY_FIELDS[name] for name in json.loads(answer)}))
    if kind == "to-list":
        between, before = ("\\n- ", "- ") if answer.startswith("- ") else (", ", "")
        more = answer.count("\n" if before else ", ")
        return f"regex:{before}{PAIR}({between}{PAIR}){{{more}}}"
    return {
        "route": "choice:" + json.dumps(sorted(corpus.TEAMS)),
        "number": "regex:[0-9]{4,5}",
        "contains": 'choice:["yes", "no"]',
    }[kind]


def tiny_structured() -> list[Constrained]:
    """Make the prompts for the bundled pair, from seeds that it was not trained on."""
    found: dict[str, list[Constrained]] = {kind: [] for kind in TINY_KINDS}
    known: set[str] = set()
    seed = TINY_SEED
    while min(map(len, found.values())) < TINY_EACH:
        # The tasks made from the library's text are passed over, so any text will do.
        kind, prompt, answer = corpus.task(seed, ["def nothing(): ..."], ["Nothing."] * 3)
        seed += 1
        if kind not in found or len(found[kind]) == TINY_EACH or prompt in known:
            continue
        grammar = tiny_grammar(kind, answer)
        if grammar is not None and len(answer) <= MOST_CHARACTERS:
            known.add(prompt)
            found[kind].append(Constrained(kind, "generated", prompt, grammar, answer))
    return [found[kind][number] for number in range(TINY_EACH) for kind in TINY_KINDS]


# --- files ------------------------------------------------------------------------------------

HEADER = base.HEADER.replace("make_workloads.py", "make_structured_workloads.py")


def jsonl(drafts: Sequence[Constrained]) -> str:
    """Give ids to drafts, and print one prompt a line."""
    counts = Counter[str]()
    lines = []
    for draft in drafts:
        counts[draft.category] += 1
        line = {
            "id": f"{draft.category}-{counts[draft.category]:02d}",
            "category": draft.category,
            "domain": draft.domain,
            "prompt" if isinstance(draft.body, str) else "messages": draft.body,
            "grammar": draft.grammar,
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)


def build() -> dict[str, str]:
    """Return the text of every file, by file name."""
    ordered = base.ordered("structured", structured())
    plans = {
        "structured": (
            [draft for draft in ordered if isinstance(draft, Constrained)],
            "Records as JSON, function calls, labels and fixed notations, each held to its own schema, list\n"
            "  of choices or regular expression: the grammar foretells much of the answer.",
            128,
        ),
        "tiny-structured": (
            tiny_structured(),
            "The same for the bundled pair, in the form of the tasks that it was trained on.",
            64,
        ),
    }
    files = {}
    for name, (drafts, description, max_new_tokens) in plans.items():
        prompts = jsonl(drafts)
        files[f"{name}.jsonl"] = prompts
        files[f"{name}.yaml"] = HEADER.format(
            name=name,
            description=description,
            sha256=hashlib.sha256(prompts.encode()).hexdigest(),
            max_new_tokens=max_new_tokens,
            loads="c=1",
            headline="decode",
        )
        files[f"{name}.yaml"] += "without_grammar: true\n"
    return files


def main() -> None:
    """Write the files, and say how many prompts each workload holds."""
    for file_name, text in build().items():
        (base.WORKLOADS / file_name).write_text(text, encoding="utf-8", newline="\n")
        if file_name.endswith(".jsonl"):
            print(f"{file_name}: {text.count(chr(10))} prompts")


if __name__ == "__main__":
    main()
