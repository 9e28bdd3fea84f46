"""Grammars: what may follow agrees with brute force, and a window is masked by each row's own ancestors."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specbench import models as specbench_models
from specbench.bench.run import _encode
from specbench.errors import UsageError, WorkloadError
from specbench.grammar import parse_grammar
from specbench.runtime.grammar import (
    DraftConstraint,
    GrammarCompiler,
    Matcher,
    fill_rows,
    unpack,
    window_masks,
)
from specbench.workloads import load

EOS = "<eos>"
PADDING = 3
TOKENS = [b"a", b"b", b"c", b"1", b"ab", b"bc", b"aab", b"\xc3", b"\xa9", "é".encode(), b"a\xc3", b"x"]
"""Of the toy vocabulary, from id 1; some cut a character in two."""


def toy_tokenizer(tokens: Sequence[bytes]) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with these tokens after `EOS`, id 0."""
    letters = bytes_to_unicode()
    names = ["".join(letters[byte] for byte in token) for token in tokens]
    vocabulary = {name: index for index, name in enumerate([EOS, *names])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([EOS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


@functools.cache
def toy(eos_ids: tuple[int, ...] = (0,)) -> GrammarCompiler:
    """Return a compiler for the toy vocabulary, with padding ids after it."""
    size = len(TOKENS) + 1 + PADDING
    return GrammarCompiler(toy_tokenizer(TOKENS), vocab_size=size, eos_ids=eos_ids)


@functools.cache
def tiny() -> tuple[GrammarCompiler, Any]:
    """Return a compiler for the bundled model, and its tokenizer."""
    loaded = specbench_models.load("tiny")
    ends = loaded.eos_token_ids
    return (
        GrammarCompiler(loaded.tokenizer, vocab_size=loaded.vocab_size, eos_ids=ends),
        loaded.tokenizer,
    )


def ids_of(mask: torch.Tensor) -> set[int]:
    """Return the tokens that a mask `[V]` allows."""
    return set(mask.nonzero().flatten().tolist())


# --- what may follow --------------------------------------------------------------------------

LONGEST = 7
MARGIN = 3
"""No text of these grammars needs more than this many characters to be completed."""
REGEXES = [
    "a*b",
    "(ab|c)*",
    "a{2,3}c?",
    "[ab]c*1?",
    "a|ab|abc",
    "(a|b)(b|c)",
    "(c(a*)1)?",
    "[^acx1]*a",
    "é*(ab?é|b)",
    "ééa",
    "^ab?$",
    "(?i)ABC",
    r"\d[abc1]",
    ".",
]
CHOICES = [["a", "ab", "cab"], ["é", "éb"], ["b"]]


def grammars() -> list[tuple[str, str]]:
    """Return (grammar, an equal expression for `re`)."""
    choices = [(f"choice:{json.dumps(choice)}", "|".join(map(re.escape, choice))) for choice in CHOICES]
    return [(f"regex:{regex}", regex) for regex in REGEXES] + choices


@functools.cache
def texts() -> list[str]:
    """Return every text of up to `LONGEST` characters of the toy alphabet (é: two bytes, fewer of them)."""
    plain = ["".join(t) for n in range(LONGEST + 1) for t in itertools.product("abc1", repeat=n)]
    accented = ["".join(t) for n in range(LONGEST) for t in itertools.product("abé", repeat=n)]
    return plain + [text for text in accented if "é" in text] + ["x", "1x"]


@pytest.mark.parametrize(("grammar", "expression"), grammars())
def test_allowed_agrees_with_brute_force(grammar: str, expression: str) -> None:
    """After every short run of tokens, a token is allowed iff some text of the grammar continues with it."""
    compiler = toy()
    language = {text.encode() for text in texts() if re.fullmatch(expression, text)}
    prefixes = {text[:n] for text in language for n in range(len(text) + 1)}
    pending: list[tuple[list[int], bytes]] = [([], b"")]
    seen = 0
    while pending:
        tokens, text = pending.pop()
        matcher = compiler.matcher(grammar)
        assert all(matcher.accept(token) for token in tokens)
        expected = {n for n, token in enumerate(TOKENS, start=1) if text + token in prefixes}
        expected |= {0} if text in language else set()
        assert ids_of(matcher.allowed()) == expected, (tokens, text)
        assert matcher.is_accepting == (text in language)
        accepted = {token for token in range(-1, compiler.vocab_size + 1) if matcher.fork().accept(token)}
        assert accepted == expected
        seen += 1
        for token in expected - {0}:
            longer = text + TOKENS[token - 1]
            if len(longer) + len(TOKENS[6]) <= LONGEST - MARGIN:
                pending.append(([*tokens, token], longer))
    assert seen > 1 or len(language) < 3


def test_every_eos_ends_a_text() -> None:
    """Each EOS id is allowed where the text is complete, also one that only the model's head has."""
    compiler = toy((0, 14))
    matcher = compiler.matcher("regex:ab*")
    assert ids_of(matcher.allowed()) == {1, 5}
    assert not matcher.fork().accept(14)
    matcher.accept(5)
    assert ids_of(matcher.allowed()) == {0, 2, 14}
    assert matcher.accept(14)
    assert (matcher.is_finished, matcher.length) == (True, 2)
    assert ids_of(matcher.allowed()) == {0, 14}
    assert not any(matcher.accept(token) for token in range(compiler.vocab_size))
    matcher.rollback(1)
    assert (matcher.is_finished, matcher.length) == (False, 1)
    assert ids_of(matcher.allowed()) == {0, 2, 14}


def test_only_eos_follows_a_finished_text() -> None:
    """Where a text is complete and nothing may follow it, EOS alone is allowed."""
    compiler, tokenizer = tiny()
    for grammar, answer in [
        ('choice:["yes", "no"]', "no"),
        ("regex:[0-9]{3}", "123"),
        ('json:{"type": "array", "items": {"type": "integer"}, "maxItems": 2}', "[1, 20]"),
    ]:
        matcher = compiler.matcher(grammar)
        assert all(matcher.accept(token) for token in tokenizer.encode(answer))
        assert ids_of(matcher.allowed()) == compiler.eos_ids


@pytest.mark.parametrize("text", ['"', "\\", "a\nb", "a/b", "é ü", "a.b*c", "#~&-", "[x]{2}^$|()?+", "日本"])
def test_choices_are_literal(text: str) -> None:
    """Whatever characters a choice has, it is itself, and not an expression."""
    compiler, tokenizer = tiny()
    matcher = compiler.matcher("choice:" + json.dumps([text, "other"]))
    assert all(matcher.accept(token) for token in tokenizer.encode(text))
    assert ids_of(matcher.allowed()) == compiler.eos_ids


# --- documents --------------------------------------------------------------------------------

SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "rows": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}},
            },
            "none": {"type": "null"},
        },
        "required": ["rows", "none"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["open", "closed", 3, None]},
            "count": {"type": "integer", "minimum": -20, "maximum": 300},
            "name": {"type": "string", "minLength": 1, "maxLength": 6},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
        },
        "required": ["count"],
        "additionalProperties": False,
    },
    "union": {
        "anyOf": [
            {"const": "none"},
            {"type": "array", "minItems": 2, "maxItems": 2, "items": {"$ref": "#/$defs/share"}},
        ],
        "$defs": {"share": {"type": "number", "minimum": 0, "exclusiveMaximum": 1}},
    },
    "texts": {"type": "array", "maxItems": 4, "items": {"type": "string", "maxLength": 5}},
}


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Check a document against the keywords that `SCHEMAS` uses."""
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema and not any(is_valid(value, option, root) for option in schema["anyOf"]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    types: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
        "integer": int, "number": (int, float),
    }  # fmt: skip
    expected = schema.get("type")
    if expected and not isinstance(value, types[expected]):
        return False
    if expected in ("integer", "number"):
        within = schema.get("minimum", value) <= value <= schema.get("maximum", value)
        return not isinstance(value, bool) and within and value < schema.get("exclusiveMaximum", value + 1)
    if expected == "string":
        sized = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return sized and re.search(schema.get("pattern", ""), value) is not None
    if expected == "array":
        sized = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return sized and all(is_valid(item, schema["items"], root) for item in value)
    if expected == "object":
        known = schema["properties"]
        present = set(schema.get("required", ())) <= set(value) <= set(known)
        return present and all(is_valid(item, known[key], root) for key, item in value.items())
    return True


def random_answer(matcher: Matcher, rng: random.Random) -> list[int]:
    """Draw tokens uniformly from those allowed until EOS."""
    tokens: list[int] = []
    while not matcher.is_finished:
        tokens.append(rng.choice(sorted(ids_of(matcher.allowed()))))
        assert matcher.accept(tokens[-1])
        assert len(tokens) < 400
    return tokens


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_documents_are_valid(name: str) -> None:
    """Whatever is drawn from the allowed tokens parses, validates, and has its properties in order."""
    compiler, tokenizer = tiny()
    rng = random.Random(name)
    schema = SCHEMAS[name]
    answers = set()
    for _ in range(60):
        tokens = random_answer(compiler.matcher("json:" + json.dumps(schema)), rng)
        assert tokens[-1] in compiler.eos_ids
        text = tokenizer.decode(tokens[:-1])
        value = json.loads(text)
        assert is_valid(value, schema, schema), text
        if isinstance(value, dict):
            assert list(value) == [key for key in schema["properties"] if key in value]
        answers.add(text)
    assert len(answers) > 10


def test_the_checker_of_documents_refuses() -> None:
    """The check that the documents passed is one that others fail."""
    for name, value in [
        ("nested", {"rows": [], "none": None}),
        ("nested", {"rows": [[1]], "none": None}),
        ("optional", {"kind": "open"}),
        ("optional", {"count": 301}),
        ("optional", {"count": 1, "name": ""}),
        ("optional", {"count": 1, "code": "A-1"}),
        ("optional", {"count": 1, "more": 1}),
        ("union", [0.5]),
        ("union", [0.5, 1]),
        ("texts", ["abcdef"]),
    ]:
        assert not is_valid(value, SCHEMAS[name], SCHEMAS[name]), (name, value)


def test_documents_are_laid_out_on_one_line() -> None:
    """JSON is written as `json.dumps` does, unless the schema says otherwise."""
    compiler, tokenizer = tiny()
    schema: dict[str, Any] = {"type": "array", "minItems": 2, "items": {"type": "boolean"}}
    loose = {**schema, "x-guidance": {"whitespace_flexible": True, "item_separator": ","}}
    for text, strict in [("[true, false]", True), ("[true,false]", False), ("[ true,\n false]", False)]:
        tokens = tokenizer.encode(text)
        matchers = [compiler.matcher("json:" + json.dumps(each)) for each in (schema, loose)]
        fits = [all(matcher.accept(token) for token in tokens) for matcher in matchers]
        assert fits == [strict, True]


@functools.cache
def made() -> dict[str, dict[str, str]]:
    """Return the answers that the bundled prompts were made with, by workload and prompt."""
    tools = str(Path(__file__).parents[1] / "tools")
    sys.path.insert(0, tools)
    try:
        module = importlib.import_module("make_structured_workloads")
    finally:
        sys.path.remove(tools)
    drafts = {"structured": module.structured(), "tiny-structured": module.tiny_structured()}
    return {
        name: {d.body if isinstance(d.body, str) else d.body[0]["content"]: d.answer for d in listed}
        for name, listed in drafts.items()
    }


@pytest.mark.parametrize("name", ["structured", "tiny-structured"])
def test_bundled_grammars_permit_the_answer(name: str) -> None:
    """Each bundled grammar permits the answer its prompt was made with, and fewer tokens than there are."""
    compiler, tokenizer = tiny()
    workload = load(name)
    answers = made()[name]
    longest = 0
    for prompt in workload.prompts:
        assert prompt.grammar is not None
        answer = answers[prompt.text or (prompt.messages or ())[0]["content"]]
        matcher = compiler.matcher(prompt.grammar)
        assert int(matcher.allowed().sum()) < compiler.vocab_size / 2
        tokens = [*tokenizer.encode(answer), *compiler.eos_ids]
        assert all(matcher.accept(token) for token in tokens), (prompt.id, answer)
        longest = max(longest, len(tokens))
    if name.startswith("tiny"):
        assert 40 < longest <= workload.max_new_tokens


def test_prompts_keep_their_grammars(tmp_path: Path) -> None:
    """A prompt's grammar reaches the run, where one that its model cannot satisfy is refused by name."""
    model = specbench_models.load("tiny")
    rows = [{"prompt": "x", "grammar": "regex:[0-9]+"}, {"prompt": "y"}]
    file = tmp_path / "some.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    encoded = _encode(load(file), model)
    assert [prompt.grammar for prompt in encoded] == ["regex:[0-9]+", None]
    rows[1].update(id="second", grammar=r"regex:[^\x00-\x{10ffff}]")
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(WorkloadError, match=r"prompt 'second' of 'some': .* cannot write any text") as caught:
        _encode(load(file), model)
    assert "\n" not in caught.value.message


# --- going back -------------------------------------------------------------------------------

SOME = [
    "regex:(ab|c)*",
    "regex:é*(ab?é|b)",
    'choice:["a", "ab", "cab"]',
]


def check_replay(compiler: GrammarCompiler, grammar: str, rng: random.Random, steps: int) -> None:
    """Walk at random, forward and back, comparing with a matcher that only went forward."""
    matcher, tokens = compiler.matcher(grammar), list[int]()
    for _ in range(steps):
        if tokens and (rng.random() < 0.35 or matcher.is_finished):
            num = rng.randint(1, min(len(tokens), 6))
            matcher.rollback(num)
            del tokens[-num:]
        else:
            tokens.append(rng.choice(sorted(ids_of(matcher.allowed()))))
            assert matcher.accept(tokens[-1])
        if rng.random() < 0.2:
            matcher = matcher.fork()
        if rng.random() < 0.2:
            refused = set(range(compiler.vocab_size)) - ids_of(matcher.allowed())
            assert not matcher.accept(rng.choice(sorted(refused)))
        fresh = compiler.matcher(grammar)
        assert all(fresh.accept(token) for token in tokens)
        assert torch.equal(matcher.allowed(), fresh.allowed())
        assert (matcher.is_accepting, matcher.is_finished) == (fresh.is_accepting, fresh.is_finished)
        assert matcher.length == len(tokens)


@pytest.mark.parametrize("grammar", SOME)
def test_rollback_equals_replay(grammar: str) -> None:
    """After any walk forward and back, what is allowed is what a new matcher allows after the same tokens."""
    for seed in range(8):
        check_replay(toy(), grammar, random.Random(seed), 60)


@pytest.mark.parametrize("name", SCHEMAS)
def test_rollback_equals_replay_in_documents(name: str) -> None:
    """The same holds within JSON, where what is allowed depends on what was opened."""
    for seed in range(3):
        check_replay(tiny()[0], "json:" + json.dumps(SCHEMAS[name]), random.Random(seed), 60)


def test_rollback_beyond_the_beginning() -> None:
    """No more can be taken back than was accepted."""
    matcher = toy().matcher("regex:ab*")
    matcher.accept(1)
    with pytest.raises(ValueError, match="cannot take back 2 of 1 tokens"):
        matcher.rollback(2)
    matcher.rollback(1)
    assert ids_of(matcher.allowed()) == {1, 5}


def test_forks_go_on_by_themselves() -> None:
    """What one of two forks accepts leaves the other where it was."""
    first = toy().matcher("regex:ab*c")
    first.accept(1)
    second = first.fork()
    first.accept(3)
    assert ids_of(second.allowed()) == {2, 3, 6}
    second.rollback(1)
    assert ids_of(first.allowed()) == {0}


# --- windows and drafts -----------------------------------------------------------------------


def naive_window(
    compiler: GrammarCompiler, grammar: str, committed: list[int], nodes: list[int], parents: list[int]
) -> dict[int, set[int]]:
    """Return what is allowed after each allowed node, -1 for the committed tokens, by one replay per path."""
    found = {}
    for node in range(-1, len(nodes)):
        path, at = list[int](), node
        while at >= 0:
            path.insert(0, nodes[at])
            at = parents[at]
        matcher = compiler.matcher(grammar)
        if all(matcher.accept(token) for token in committed + path):
            found[node] = ids_of(matcher.allowed())
    return found


def random_proposal(
    compiler: GrammarCompiler, start: Matcher, rng: random.Random, chain: bool
) -> tuple[list[int], list[int]]:
    """Return a proposal whose tokens are mostly allowed."""
    nodes, parents, states = list[int](), list[int](), [start]
    for node in range(rng.randint(0, 9)):
        parent = node - 1 if chain else rng.randint(-1, node - 1)
        state = states[parent + 1].fork()
        token = rng.randrange(compiler.vocab_size)
        if rng.random() < 0.85:
            token = rng.choice(sorted(ids_of(state.allowed())))
        state.accept(token)  # where it is refused, what follows is drawn as if it had not been there
        nodes.append(token)
        parents.append(parent)
        states.append(state)
    return nodes, parents


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("grammar", [*SOME, "json:" + json.dumps(SCHEMAS["optional"])])
def test_window_equals_every_path(grammar: str, chain: bool) -> None:
    """The kept nodes and their masks are what a walk along each path alone gives, and nothing has moved."""
    compiler = tiny()[0] if grammar.startswith("json") else toy()
    cut = 0
    for seed in range(40):
        rng = random.Random(seed)
        matcher = compiler.matcher(grammar)
        committed = list[int]()
        for _ in range(rng.randint(0, 3)):
            if matcher.is_finished:
                break
            committed.append(rng.choice(sorted(ids_of(matcher.allowed()))))
            matcher.accept(committed[-1])
        nodes, parents = random_proposal(compiler, matcher, rng, chain)
        before = matcher.allowed()
        kept, bits = window_masks(matcher, nodes, parents)
        expected = naive_window(compiler, grammar, committed, nodes, parents)
        assert kept == sorted(set(expected) - {-1})
        masks = unpack(bits, compiler.vocab_size)
        assert masks.shape == (len(nodes) + 1, compiler.vocab_size)
        for node, allowed in expected.items():
            assert ids_of(masks[node + 1]) == allowed
        for node in set(range(len(nodes))) - set(kept):
            assert bool(masks[node + 1].all())
        assert torch.equal(matcher.allowed(), before)
        assert matcher.length == len(committed)
        cut += len(nodes) - len(kept)
    assert cut > 0


def test_parents_come_first() -> None:
    """A proposal out of order is refused before anything is read from it."""
    with pytest.raises(ValueError, match="node 0 has the parent 1"):
        window_masks(toy().matcher("regex:ab*"), [1, 2], [1, -1])


def test_a_batch_is_masked_in_place() -> None:
    """Windows of different rows are written into one tensor; a row without a grammar allows everything."""
    compiler = toy()
    bits = compiler.allocate(2 * 3).view(2, 3, -1)
    window_masks(compiler.matcher("regex:ab*"), [1, 2], [-1, 0], bits[1])
    masks = unpack(bits, compiler.vocab_size)
    assert bool(masks[0].all())
    assert [ids_of(mask) for mask in masks[1]] == [{1, 5}, {0, 2}, {0, 2}]
    rows = compiler.allocate(2)
    fill_rows([None, compiler.matcher("regex:ab*")], rows)
    assert bool(unpack(rows, compiler.vocab_size)[0].all())
    assert ids_of(unpack(rows, compiler.vocab_size)[1]) == {1, 5}
    with pytest.raises(ValueError, match="contiguous"):
        compiler.matcher("regex:ab*").fill(torch.zeros(4, 2, dtype=torch.int32).t()[0])


def test_unpack_reads_every_bit() -> None:
    """Bit i of a packed row, from the low end, is token i."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (3, 4), generator=generator).to(torch.int32)
    expected = [[bool(row[i // 32] >> (i % 32) & 1) for i in range(121)] for row in bits.tolist()]
    assert unpack(bits, 121).tolist() == expected


def test_drafting_within_grammars() -> None:
    """Each row of a batch is held to its own grammar at each depth, and restored to the committed text."""
    compiler = toy()
    matchers = [compiler.matcher("regex:ab*c"), None, compiler.matcher('choice:["ab", "b"]'), None]
    last = compiler.matcher("regex:a*b")
    last.accept(1)
    matchers[3] = last
    everything = set(range(compiler.vocab_size))
    constraint = DraftConstraint(compiler, matchers)
    assert [ids_of(mask) for mask in constraint.masks()] == [{1, 5}, everything, {1, 2, 5}, {1, 2, 5, 7}]
    constraint.advance([1, 9, 5, None])
    assert [ids_of(mask) for mask in constraint.masks()] == [{2, 3, 6}, everything, {0}, {1, 2, 5, 7}]
    constraint.advance([6, 9, 0, 2])
    assert [ids_of(mask) for mask in constraint.masks()] == [{0}, everything, {0}, {0}]
    constraint.advance([0, 9, 0, None])
    constraint.restore()
    assert [ids_of(mask) for mask in constraint.masks()] == [{1, 5}, everything, {1, 2, 5}, {1, 2, 5, 7}]
    assert last.length == 1


def test_an_unmasked_draft_is_noticed() -> None:
    """A drafted token that the masks forbade is an error of the caller, not a shorter draft."""
    compiler = toy()
    constraint = DraftConstraint(compiler, [None, compiler.matcher("regex:ab*c")])
    with pytest.raises(ValueError, match="row 1 drafted token 3"):
        constraint.advance([3, 3])


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("yes", "no kind of grammar 'yes'"),
        ("jsn:{}", "no kind of grammar 'jsn'; did you mean 'json'?"),
        ("json:", "invalid JSON: Expecting value (column 1)"),
        ("json:[1]", "a schema is an object in braces"),
        ('json:{"const": NaN}', "NaN is no JSON value"),
        ("json:" + "[" * 100_000, "invalid JSON"),
        ('json:{"type": "strin"}', "Invalid type: strin"),
        ('json:{"not": {}}', 'Unimplemented keys: ["not"]'),
        ('json:{"type": "array", "uniqueItems": true}', 'Unimplemented keys: ["uniqueItems"]'),
        ('json:{"type": "string", "pattern": "("}', "unclosed group"),
        ('json:{"enum": []}', "Unsatisfiable schema"),
        ('json:{"type": "integer", "minimum": 5, "maximum": 3}', "minimum (5) is greater than maximum (3)"),
        ('json:{"$ref": "#/nowhere"}', "'/nowhere' does not exist"),
        ('json:{"x-guidance": 1}', "x-guidance is an object in braces"),
        ("regex:", "the expression is empty"),
        ("regex:(", "unclosed group"),
        ("regex:a{2,1}", "invalid repetition count range"),
        ("regex:a(?=b)", "look-around"),
        ("regex:\\bword", "lookarounds not supported"),
        ("regex:\ud800", "half of a surrogate pair"),
        ("choice:[]", "there is nothing to choose from"),
        ('choice:["a", 1]', "expected a list of texts"),
        ('choice:["a", ""]', "one of the texts is empty"),
        ('choice:["a", "b", "a"]', "a text is listed twice"),
        ("choice:a,b", "invalid JSON"),
    ],
)  # fmt: skip
def test_invalid_grammars(text: str, what: str) -> None:
    """A grammar that cannot be used is refused in one line that says why, with a way out."""
    with pytest.raises(UsageError) as caught:
        parse_grammar(text)
    assert what in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("regex:ay", "cannot write any text of it"),
        ("regex:a{1,99}y", "cannot write any text of it"),
        (r"regex:[^\x00-\x{10ffff}]", "cannot write any text of it"),
        ('json:{"const": "a"}', "cannot write any text of it"),
        ('choice:["ab", "ay"]', "cannot write 'ay'"),
        ('choice:["ü"]', "cannot write any text of it"),
    ],
)
def test_grammars_beyond_the_vocabulary(text: str, what: str) -> None:
    """A grammar whose texts need bytes that no token has is refused before anything is decoded."""
    with pytest.raises(UsageError) as caught:
        toy().matcher(text)
    assert what in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_a_dead_end_is_an_error() -> None:
    """A way into the grammar that no token leads out of fails in one line, and never allows EOS."""
    matcher = toy().matcher("regex:ay|b")
    assert ids_of(matcher.allowed()) == {1, 2}
    matcher.accept(1)
    with pytest.raises(UsageError, match="failed after 1 tokens: no token of the vocabulary") as caught:
        matcher.allowed()
    assert "\n" not in caught.value.message


def test_what_grammars_need() -> None:
    """A compiler needs an EOS that the tokenizer has, and a tokenizer it can read."""
    for ends in ((), (14,)):
        with pytest.raises(UsageError, match="needs an end-of-sequence token"):
            GrammarCompiler(toy_tokenizer(TOKENS), vocab_size=16, eos_ids=ends)
    with pytest.raises(UsageError, match="fast tokenizer"):
        GrammarCompiler(object(), vocab_size=16, eos_ids=(0,))
    words = Tokenizer(models.WordLevel({EOS: 0, "a": 1}, unk_token=EOS))
    words.add_special_tokens([EOS])
    with pytest.raises(UsageError, match="cannot be used with this tokenizer") as caught:
        GrammarCompiler(PreTrainedTokenizerFast(tokenizer_object=words), vocab_size=2, eos_ids=(0,))
    assert "\n" not in caught.value.message


def test_padding_is_never_allowed() -> None:
    """Ids beyond the tokenizer's, and those that a smaller output head lacks, are not allowed."""
    wide = toy().matcher("regex:.*")
    assert len(wide.allowed()) == len(TOKENS) + 1 + PADDING
    assert not bool(wide.allowed()[len(TOKENS) + 1 :].any())
    narrow = GrammarCompiler(toy_tokenizer(TOKENS), vocab_size=4, eos_ids=(0,)).matcher("regex:[abc1]*")
    assert ids_of(narrow.allowed()) == {0, 1, 2, 3}
    assert not narrow.accept(4)
