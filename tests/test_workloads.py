"""Workloads: the bundled prompts keep their promises, and bad input is refused in one clear line."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import subprocess
import sys
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import WorkloadError
from specbench.workloads import (
    Load,
    Message,
    Prompt,
    available,
    load,
    load_many,
    poisson_arrivals,
    with_twins,
)
from specbench.workloads.library import bundled_folder
from specbench.workloads.workload import stratified

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ["high-concurrency", "novel", "predictable", "short-output", "structured"]
TINY = [f"tiny-{name}" for name in BUNDLED]
CHARACTERS_PER_TOKEN = 4.2


def write(folder: Path, name: str, content: str | bytes) -> Path:
    """Write a file and return its path."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(spec: str | Path) -> WorkloadError:
    """Load something that must be refused, in one line and with a hint."""
    with pytest.raises(WorkloadError) as caught:
        load(spec)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


# --- bundled workloads ------------------------------------------------------------------------


def test_available() -> None:
    """The bundled workloads, five for real models and five for the bundled pair, are listed in order."""
    assert available() == sorted(BUNDLED + TINY)


@pytest.mark.parametrize("name", TINY)
def test_tiny(name: str) -> None:
    """A workload of the bundled pair has 80 prompts or more, none twice, and the settings of its kind."""
    workload, kind = load(name), load(name.removeprefix("tiny-"))
    header = yaml.safe_load((bundled_folder() / f"{name}.yaml").read_text())
    assert header["sha256"] == workload.digest
    assert len(workload.prompts) >= 80
    assert len({prompt.plain for prompt in workload.prompts}) == len(workload.prompts)
    assert (workload.headline, workload.loads) == (kind.headline, kind.loads)
    assert max(len(prompt.plain) for prompt in workload.prompts) < 1500


@pytest.mark.parametrize("name", BUNDLED)
def test_hash_in_header(name: str) -> None:
    """The hash in each header is the SHA-256 of the prompt file, and becomes the digest."""
    header = yaml.safe_load((bundled_folder() / f"{name}.yaml").read_text())
    actual = hashlib.sha256((bundled_folder() / f"{name}.jsonl").read_bytes()).hexdigest()
    assert header["sha256"] == actual == load(name).digest


@pytest.mark.parametrize("name", BUNDLED)
def test_header_agrees(name: str) -> None:
    """A bundled workload is called as its file, free to use, and run at temperatures 0 and 1."""
    workload = load(name)
    assert workload.name == name
    assert workload.licence == "CC0-1.0"
    assert workload.source == f"bundled:{name}"
    assert workload.temperatures == (0.0, 1.0)
    assert workload.available == len(workload.prompts)
    assert "\n" not in workload.description


@pytest.mark.parametrize(
    ("name", "headline", "max_new_tokens", "loads"),
    [
        ("predictable", "decode", 128, ["c=1"]),
        ("novel", "decode", 128, ["c=1"]),
        ("short-output", "e2e", 16, ["c=1"]),
        ("high-concurrency", "throughput", 64, ["c=1", "c=8", "c=32", "poisson=0.7"]),
        ("structured", "decode", 128, ["c=1"]),
    ],
)
def test_settings(name: str, headline: str, max_new_tokens: int, loads: list[str]) -> None:
    """Each class has the headline, the budget and the loads that DESIGN gives it."""
    workload = load(name)
    assert workload.headline == headline
    assert workload.max_new_tokens == max_new_tokens
    assert [each.label for each in workload.loads] == loads


@pytest.mark.parametrize("name", BUNDLED)
def test_counts(name: str) -> None:
    """Each class has 80 prompts, evenly spread over at least four categories and over many domains."""
    prompts = load(name).prompts
    categories = Counter(prompt.category for prompt in prompts)
    assert len(prompts) == 80
    assert len(categories) >= 4
    assert len(set(categories.values())) == 1
    assert len({prompt.domain for prompt in prompts}) >= 12


@pytest.mark.parametrize("name", BUNDLED)
def test_no_shared_prefix(name: str) -> None:
    """No two prompts of a class share their first 40 characters, and ids and contents are unique."""
    prompts = load(name).prompts
    assert len({prompt.plain[:40] for prompt in prompts}) == len(prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def test_classes_share_nothing() -> None:
    """No prompt occurs in two classes."""
    contents = [prompt.plain for name in BUNDLED for prompt in load(name).prompts]
    assert len(set(contents)) == len(contents)


@pytest.mark.parametrize("name", BUNDLED)
def test_lengths(name: str) -> None:
    """Where documents belong, four prompts are over a thousand tokens long; none is over 1,900."""
    lengths = [len(prompt.plain) / CHARACTERS_PER_TOKEN for prompt in load(name).prompts]
    assert max(lengths) < 1900
    if name in ("predictable", "high-concurrency"):
        assert sum(length > 1000 for length in lengths) >= 4
    else:
        assert max(lengths) < 200


@pytest.mark.parametrize("name", BUNDLED + TINY)
def test_grammars_where_they_belong(name: str) -> None:
    """Each prompt of the structured workloads has a grammar, of every kind, and no other prompt has one."""
    grammars = [prompt.grammar for prompt in load(name).prompts]
    if name.endswith("structured"):
        kinds = Counter(str(grammar).partition(":")[0] for grammar in grammars)
        assert set(kinds) == {"json", "regex", "choice"}
        assert min(kinds.values()) >= 16
    else:
        assert set(grammars) == {None}


@pytest.mark.parametrize("name", BUNDLED)
def test_long_prompts_vary(name: str) -> None:
    """A long prompt is varied text: no line or sentence of it makes up its length by repetition."""
    for prompt in load(name).prompts:
        if len(prompt.plain) > 3000:
            pieces = [
                piece for line in prompt.plain.splitlines() for piece in line.split(". ") if len(piece) > 30
            ]
            assert len(set(pieces)) >= 0.95 * len(pieces), prompt.id


@pytest.mark.parametrize("name", BUNDLED)
def test_plain_text_for_every_template(name: str) -> None:
    """Bundled prompts are ASCII, and their chats hold no system message and alternate."""
    for prompt in load(name).prompts:
        assert prompt.plain.isascii()
        for number, message in enumerate(prompt.messages or ()):
            assert message["role"] == ("user", "assistant")[number % 2]


@pytest.mark.parametrize("name", BUNDLED)
def test_file_order_is_stratified(name: str) -> None:
    """The first lines of a bundled file are what a limit selects."""
    workload = load(name)
    assert workload.limited(17).prompts == workload.prompts[:17]


@pytest.mark.parametrize(
    ("tool", "names"),
    [("make_workloads", BUNDLED[:4]), ("make_structured_workloads", ["structured", "tiny-structured"])],
)
def test_generator_reproduces_files(tool: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools that make workloads give the committed files byte for byte."""
    if not (ROOT / "tools").exists():
        pytest.skip("not a checkout")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    built = importlib.import_module(tool).build()
    assert sorted(built) == sorted(f"{name}.{kind}" for name in names for kind in ("jsonl", "yaml"))
    for name, text in built.items():
        assert (bundled_folder() / name).read_bytes() == text.encode(), name


def test_readme_names_each() -> None:
    """The table in workloads/README.md has a row for each bundled workload with its number of prompts."""
    readme = (bundled_folder() / "README.md").read_text()
    for workload in load_many(BUNDLED):
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{workload.name}`"))
        assert f"| {workload.available} | {workload.max_new_tokens} tokens |" in row


def test_load_is_fast() -> None:
    """All bundled workloads together load in well under a second."""
    load_many(BUNDLED)
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        load_many(BUNDLED)
        best = min(best, time.perf_counter() - start)
    assert best < 0.8


def test_import_is_light() -> None:
    """Loading a workload imports none of torch, transformers and datasets."""
    program = (
        "import sys, specbench.workloads as w; w.load('novel');"
        "sys.exit(bool({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


# --- limits -----------------------------------------------------------------------------------


def test_limits_are_nested() -> None:
    """The prompts of a smaller limit are the first ones of a larger limit."""
    workload = load("predictable")
    largest = workload.limited(1000).prompts
    assert set(largest) == set(workload.prompts)
    for limit in range(1, 81):
        assert workload.limited(limit).prompts == largest[:limit]


def test_limit_keeps_the_rest() -> None:
    """A limited workload remembers how many prompts there were and keeps the digest of the whole."""
    whole = load("novel")
    part = whole.limited(8)
    assert (part.available, part.digest, len(part.prompts)) == (80, whole.digest, 8)
    assert part.limited(3) == whole.limited(3)


def test_limit_is_proportional() -> None:
    """Uneven categories are each present first, and then in proportion to their sizes."""
    categories = ["rare"] * 2 + ["common"] * 16 + ["usual"] * 6
    order = [categories[index] for index in stratified(categories)]
    assert Counter(order[:3]) == {"rare": 1, "common": 1, "usual": 1}
    assert Counter(order[:12]) == {"rare": 1, "common": 8, "usual": 3}


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=60))
def test_stratified_permutes(categories: list[str]) -> None:
    """The stratified order holds each item once, and starts with one of each category."""
    order = stratified(categories)
    assert sorted(order) == list(range(len(categories)))
    kinds = len(set(categories))
    assert len({categories[index] for index in order[:kinds]}) == kinds


@pytest.mark.parametrize("limit", [0, -3])
def test_limit_below_one(limit: int) -> None:
    """A limit below 1 is refused by name of the workload."""
    with pytest.raises(WorkloadError, match=r"limit of prompts for 'novel' must be at least 1"):
        load("novel").limited(limit)
    with pytest.raises(WorkloadError, match="at least 1"):
        load_many(["novel"], limit=limit)


def test_load_many() -> None:
    """Several workloads are loaded in the order given, each with the limit."""
    loaded = load_many(["novel", "short-output"], limit=5)
    assert [(each.name, len(each.prompts)) for each in loaded] == [("novel", 5), ("short-output", 5)]


def test_load_many_same_name(tmp_path: Path) -> None:
    """Two workloads of one name are refused, since their results could not be told apart."""
    path = write(tmp_path, "novel.txt", "hello\n")
    with pytest.raises(WorkloadError, match="two workloads are called 'novel'"):
        load_many(["novel", path])


def test_a_structured_workload_brings_its_twin() -> None:
    """It is followed by the same prompts without grammars; other workloads are as they were."""
    novel, bound, free = with_twins(load_many(["novel", "tiny-structured"], limit=6))
    assert (novel.name, bound.name, free.name) == ("novel", "tiny-structured", "tiny-structured-free")
    assert (bound.twin_of, free.twin_of) == (None, "tiny-structured")
    assert [(p.id, p.text, p.grammar) for p in free.prompts] == [(p.id, p.text, None) for p in bound.prompts]
    assert all(prompt.grammar for prompt in bound.prompts)
    assert with_twins([free]) == [free]
    assert load("structured").without_grammar


def test_a_twin_needs_its_name(tmp_path: Path) -> None:
    """A workload that is called as another's twin is refused beside it."""
    path = write(tmp_path, "tiny-structured-free.txt", "hello\n")
    with pytest.raises(WorkloadError, match="two workloads are called 'tiny-structured-free'"):
        with_twins(load_many(["tiny-structured", path]))


# --- the user's files -------------------------------------------------------------------------


def test_jsonl(tmp_path: Path) -> None:
    """A JSON Lines file gives prompts with its ids and labels, and the defaults for the rest."""
    lines = [
        {"prompt": "Once upon", "id": "a", "category": "story", "max_new_tokens": 7, "answer": 42},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    ]
    path = write(tmp_path, "mine.jsonl", "\n\n".join(map(json.dumps, lines)))
    workload = load(path)
    first, second = workload.prompts
    assert first == Prompt("a", "story", "general", text="Once upon", max_new_tokens=7)
    assert second.id == "line-3"
    assert second.messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="Hi"),
    )
    assert (workload.name, workload.max_new_tokens, workload.headline) == ("mine", 128, "decode")
    assert workload.temperatures == (0.0, 1.0)
    assert workload.loads == (Load("closed", concurrency=1),)
    assert workload.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert load(str(path)) == workload


def test_grammar(tmp_path: Path) -> None:
    """A row's grammar is kept as it is written, and counts in the digest."""
    grammar = 'json:{"type":  "integer"}'
    rows = [{"prompt": "x", "grammar": grammar}, {"prompt": "y"}]
    workload = load(write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows))))
    assert [prompt.grammar for prompt in workload.prompts] == [grammar, None]
    del rows[0]["grammar"]
    assert load(write(tmp_path, "b.jsonl", "\n".join(map(json.dumps, rows)))).digest != workload.digest


def test_line_separators(tmp_path: Path) -> None:
    """A Unicode line separator inside a JSON string does not end the line."""
    path = write(tmp_path, "odd.jsonl", json.dumps({"prompt": "one\u2028two\x85"}, ensure_ascii=False))
    assert [prompt.text for prompt in load(path).prompts] == ["one\u2028two\x85"]


def test_windows_files(tmp_path: Path) -> None:
    """A byte-order mark and Windows line ends change neither the prompts nor the digest."""
    text = '{"prompt": "a"}\n{"prompt": "b"}\n'
    unix = load(write(tmp_path, "unix.jsonl", text))
    windows = load(write(tmp_path, "windows.jsonl", b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()))
    assert (windows.prompts, windows.digest) == (unix.prompts, unix.digest)


def test_spec_bench_rows(tmp_path: Path) -> None:
    """Of a Spec-Bench question the first turn is asked as a user's message."""
    row = {"question_id": 81, "category": "writing", "turns": ["First.", "Second."]}
    (prompt,) = load(write(tmp_path, "q.jsonl", json.dumps(row))).prompts
    assert prompt == Prompt("81", "writing", "general", messages=(Message(role="user", content="First."),))


def test_spec_bench_file() -> None:
    """The published Spec-Bench file loads: 480 questions in 13 categories."""
    path = ROOT.parent / "shared" / "data" / "spec_bench_question.jsonl"
    if not path.exists():
        pytest.skip("the Spec-Bench question file is not here")
    workload = load(path)
    assert workload.available == 480
    assert len({prompt.category for prompt in workload.prompts}) == 13
    assert len({prompt.category for prompt in workload.limited(13).prompts}) == 13


def test_txt_lines(tmp_path: Path) -> None:
    """Each line of a text file that is not blank is a text to continue."""
    workload = load(write(tmp_path, "some.txt", "first\n\n  second  \n"))
    assert [(prompt.id, prompt.text) for prompt in workload.prompts] == [
        ("line-1", "first"),
        ("line-3", "  second"),
    ]


def test_txt_blocks(tmp_path: Path) -> None:
    """Lines of three dashes make the blocks between them the prompts."""
    workload = load(write(tmp_path, "some.txt", "---\none\n\ntwo\n---\n\nthree\n---\n---\n"))
    assert [(prompt.id, prompt.text) for prompt in workload.prompts] == [
        ("line-2", "one\n\ntwo"),
        ("line-6", "three"),
    ]


def test_txt_whole(tmp_path: Path) -> None:
    """A text file that ends with three dashes is one prompt."""
    assert [p.text for p in load(write(tmp_path, "one.txt", "a\nb\n---\n")).prompts] == ["a\nb"]


def test_yaml_minimal(tmp_path: Path) -> None:
    """A header needs only `prompts`; the rest is as for a file without one."""
    write(tmp_path, "p.jsonl", '{"prompt": "x"}')
    workload = load(write(tmp_path, "mine.yaml", "prompts: p.jsonl"))
    assert (workload.name, workload.licence, workload.max_new_tokens) == ("mine", "not stated", 128)


def test_yaml_full(tmp_path: Path) -> None:
    """A header's settings reach the workload."""
    write(tmp_path, "p.jsonl", '{"prompt": "x"}')
    text = "{name: n, prompts: p.jsonl, temperatures: [0.5], max_new_tokens: 9, loads: [c=2, rate=3/s], "
    text += "headline: e2e}"
    workload = load(write(tmp_path, "mine.yml", text))
    assert (workload.name, workload.temperatures, workload.max_new_tokens) == ("n", (0.5,), 9)
    assert workload.loads == (Load("closed", concurrency=2), Load("poisson", rate=3.0))
    assert workload.headline == "e2e"


# --- what is refused --------------------------------------------------------------------------


def test_unknown_name() -> None:
    """A mistyped name is answered with the nearest one and with the list."""
    message = refused("predictabel").message
    assert "no workload 'predictabel'; did you mean 'predictable'?" in message
    assert f"(bundled: {', '.join(sorted(BUNDLED + TINY))})" in message


def test_missing_file(tmp_path: Path) -> None:
    """A missing file is named, with the nearest name in its folder."""
    write(tmp_path, "prompts.jsonl", "x")
    error = refused(tmp_path / "promts.jsonl")
    assert f"{tmp_path / 'promts.jsonl'}: no such file; did you mean 'prompts.jsonl'?" in error.message


def test_directory(tmp_path: Path) -> None:
    """A directory is refused, with the files in it that could have been meant."""
    write(tmp_path, "a.jsonl", "x")
    error = refused(str(tmp_path))
    assert "is a directory" in error.message
    assert "a.jsonl" in (error.hint or "")


@pytest.mark.parametrize("suffix", ["jsonl", "txt", "yaml"])
def test_empty_files(tmp_path: Path, suffix: str) -> None:
    """An empty file and a file of blank lines are told apart and refused."""
    assert "the file is empty" in refused(write(tmp_path, f"a.{suffix}", "")).message
    assert "holds only blank lines" in refused(write(tmp_path, f"b.{suffix}", "\n  \n\n")).message


def test_only_separators(tmp_path: Path) -> None:
    """A text file of separators alone is refused."""
    assert "no prompt between them" in refused(write(tmp_path, "a.txt", "---\n---\n")).message


def test_not_utf8(tmp_path: Path) -> None:
    """A file in another encoding is refused at the line where it shows."""
    error = refused(write(tmp_path, "a.jsonl", b'{"prompt": "a"}\n{"prompt": "\xe9"}\n'))
    assert "a.jsonl, line 2: is not UTF-8" in error.message


@pytest.mark.parametrize("name", ["a.csv", "a.json", "./noend"])
def test_unknown_suffix(tmp_path: Path, name: str) -> None:
    """A file of another kind is refused, and the hint names a kind that works."""
    error = refused(write(tmp_path, name, "[]"))
    assert "cannot read prompts from" in error.message
    assert ".jsonl" in (error.hint or "")


BAD_ROWS = {
    '{"prompt": "x"': "invalid JSON: Expecting ',' delimiter",
    "[" * 100_000: "invalid JSON",
    '["x"]': "expected an object, found a list",
    "3": "expected an object, found a number",
    "{}": "needs 'prompt', 'messages' or 'turns'",
    '{"promt": "x"}': "found only ['promt']; did you mean 'prompt'?",
    '{"prompt": "x", "messages": []}': "has both 'prompt' and 'messages'",
    '{"prompt": "x", "turns": ["y"]}': "has both 'prompt' and 'turns'",
    '{"prompt": ""}': "'prompt' is empty",
    '{"prompt": " \\n "}': "'prompt' is empty",
    '{"prompt": 3}': "'prompt' must be a string, not a number",
    '{"prompt": "\\ud800"}': "half of a surrogate pair",
    '{"messages": "hello"}': "'messages' must be a list, not a string",
    '{"messages": []}': "'messages' is empty",
    '{"messages": ["hello"]}': "message 1 must be an object with 'role' and 'content', not a string",
    '{"messages": [{"role": "usr", "content": "x"}]}': "message 1 has the role 'usr'; did you mean 'user'?",
    '{"messages": [{"content": "x"}]}': "message 1 has the role None",
    '{"messages": [{"role": ["user"], "content": "x"}]}': "message 1 has the role ['user']",
    '{"messages": [{"role": "user"}]}': "the content of message 1 must be a string, not null",
    '{"messages": [{"role": "user", "content": [{"text": "x"}]}]}': "must be a string, not a list",
    '{"messages": [{"role": "user", "content": ""}]}': "the content of message 1 is empty",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "the last message is from the assistant",
    '{"turns": "x"}': "'turns' must be a list of strings, not a string",
    '{"turns": []}': "'turns' is empty",
    '{"turns": [1]}': "the first of 'turns' must be a string",
    '{"prompt": "x", "id": true}': "'id' must be a string or a whole number, not true or false",
    '{"prompt": "x", "category": 3}': "'category' must be a word, not a number",
    '{"prompt": "x", "max_new_tokens": 0}': "'max_new_tokens' must be a whole number from 1, not 0",
    '{"prompt": "x", "max_new_tokens": "9"}': "'max_new_tokens' must be a whole number from 1, not '9'",
    '{"prompt": "x", "id": "one"}': "the id 'one' was already used at ",
    '{"prompt": "x", "grammar": {"json": {}}}': "'grammar' must be a string, not an object",
    '{"prompt": "x", "grammar": "regx:a"}': "no kind of grammar 'regx'; did you mean 'regex'?",
    '{"prompt": "x", "grammar": "regex:("}': "the grammar 'regex:' cannot be used: unclosed group",
    '{"prompt": "x", "grammar": "choice:[]"}': "there is nothing to choose from",
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.items(), ids=range(len(BAD_ROWS)))
def test_bad_row(tmp_path: Path, row: str, message: str) -> None:
    """A malformed row is refused with its file, its line and what is wrong with it."""
    error = refused(write(tmp_path, "a.jsonl", f'{{"prompt": "fine", "id": "one"}}\n\n{row}\n'))
    assert error.message.startswith(f"{tmp_path / 'a.jsonl'}, line 3: ")
    assert message in error.message


BAD_HEADERS = {
    "name: [\nprompts: p.jsonl": "line 2: invalid YAML",
    "name: 'x\n": "invalid YAML",
    "name: !!python/object:os.system x": "line 1: invalid YAML",
    "name: 2024-99-99": "invalid YAML",
    "- a\n- b": "expected a mapping of keys to values",
    "just words": "expected a mapping of keys to values",
    "name: x": "needs a value for 'prompts'",
    "prompts: [p.jsonl]": "'prompts' must be a string, not ['p.jsonl']",
    "prompts: other.jsonl": "other.jsonl: no such file",
    "prompts: p.jsonl\ntemprature: [1]": "unknown key 'temprature'; did you mean 'temperatures'?",
    "prompts: p.jsonl\n3: x": "unknown key '3'",
    "prompts: p.jsonl\nwithout_grammar: some": "'without_grammar' must be true or false, not 'some'",
    "prompts: p.jsonl\nname: 7": "'name' must be a string, not 7",
    "prompts: p.jsonl\ntemperatures: 1": "'temperatures' must be a list of numbers, not 1",
    "prompts: p.jsonl\ntemperatures: []": "'temperatures' must be a list of numbers, not []",
    "prompts: p.jsonl\ntemperatures: [0, hot]": "'temperatures' holds 'hot'",
    "prompts: p.jsonl\ntemperatures: [true]": "'temperatures' holds True",
    "prompts: p.jsonl\ntemperatures: [-1]": "'temperatures' holds -1",
    "prompts: p.jsonl\ntemperatures: [.nan]": "'temperatures' holds nan",
    "prompts: p.jsonl\ntemperatures: [1, 1.0]": "the same temperature twice",
    "prompts: p.jsonl\nmax_new_tokens: 0": "'max_new_tokens' must be a whole number from 1, not 0",
    "prompts: p.jsonl\nmax_new_tokens: 1.5": "'max_new_tokens' must be a whole number from 1, not 1.5",
    "prompts: p.jsonl\nloads: c=1": "'loads' must be a list of labels, not 'c=1'",
    "prompts: p.jsonl\nloads: [8]": "'loads' holds 8, which is no label",
    "prompts: p.jsonl\nloads: [posson=0.7]": "no load 'posson=0.7'; did you mean 'poisson'?",
    "prompts: p.jsonl\nloads: [c=8, c=8]": "the same load twice",
    "prompts: p.jsonl\nheadline: decod": "no headline 'decod'; did you mean 'decode'?",
    "prompts: p.jsonl\nheadline: [decode]": "no headline ['decode']",
    "prompts: p.jsonl\nsha256: abc": "'sha256' must be 64 hexadecimal digits",
}


@pytest.mark.parametrize(("text", "message"), BAD_HEADERS.items(), ids=range(len(BAD_HEADERS)))
def test_bad_header(tmp_path: Path, text: str, message: str) -> None:
    """A malformed header is refused with its file and what is wrong with it."""
    write(tmp_path, "p.jsonl", '{"prompt": "x"}')
    error = refused(write(tmp_path, "w.yaml", text))
    assert str(tmp_path) in error.message
    assert message in error.message


def test_hash_mismatch(tmp_path: Path) -> None:
    """Prompts that differ from the header's hash are refused, and the hint gives the new line."""
    path = write(tmp_path, "p.jsonl", '{"prompt": "x"}')
    error = refused(write(tmp_path, "w.yaml", f"prompts: p.jsonl\nsha256: '{'0' * 64}'"))
    assert "p.jsonl: the prompts changed" in error.message
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    assert f'update the header with sha256: "{actual}"' in (error.hint or "")


# --- the hub ----------------------------------------------------------------------------------


class FakeTable(list[dict[str, Any]]):
    """The part of a data set that we use: rows, and the names of the columns."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0]) if self else ["prompt"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the `datasets` library: `tables` by (name, config, split), and what was asked for."""
    module: Any = types.ModuleType("datasets")
    module.exceptions = types.ModuleType("datasets.exceptions")
    module.exceptions.DatasetsError = type("DatasetsError", (Exception,), {})
    module.exceptions.DatasetNotFoundError = type(
        "DatasetNotFoundError", (module.exceptions.DatasetsError, FileNotFoundError), {}
    )
    module.tables = {}

    def load_dataset(name: str, config: str | None, *, split: str) -> FakeTable:
        answer = module.tables[name, config, split]
        if isinstance(answer, Exception):
            raise answer
        return FakeTable(answer)

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


@pytest.mark.parametrize(
    ("spec", "asked", "row", "text", "content"),
    [
        ("hub:o/n", ("o/n", None, "train"), {"text": "a", "label": 1}, "a", None),
        ("hub:o/n:test", ("o/n", None, "test"), {"text": "b", "prompt": "a"}, "a", None),
        ("hub:o/n:test:text", ("o/n", None, "test"), {"text": "b", "prompt": "a"}, "b", None),
        ("hub:o/n:train[:9]:question", ("o/n", None, "train[:9]"), {"question": "q"}, None, "q"),
        ("hub:o/n/main:test", ("o/n", "main", "test"), {"question": "q", "answer": "a"}, None, "q"),
        ("hub:o/n", ("o/n", None, "train"), {"instruction": "sort", "input": "2 1"}, None, "sort\n\n2 1"),
        ("hub:o/n", ("o/n", None, "train"), {"instruction": "sing", "input": ""}, None, "sing"),
    ],
)
def test_hub_columns(
    hub: Any,
    spec: str,
    asked: tuple[str, str | None, str],
    row: dict[str, Any],
    text: str | None,
    content: str | None,
) -> None:
    """The split, the configuration and the column of a data set are found as the spec says."""
    hub.tables[asked] = [row]
    workload = load(spec)
    (prompt,) = workload.prompts
    assert prompt.text == text
    asked_as_user = None if content is None else (Message(role="user", content=content),)
    assert prompt.messages == asked_as_user
    assert (workload.name, workload.source, prompt.id) == ("n", spec, "row-0")


def test_hub_messages(hub: Any) -> None:
    """The answer that closes a conversation on the hub is dropped, and the category is kept."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    hub.tables["o/n", None, "train"] = [{"messages": turns, "category": "chat"}]
    (prompt,) = load("hub:o/n").prompts
    assert prompt.messages == ({"role": "user", "content": "q"},)
    assert prompt.category == "chat"


def test_hub_digest(hub: Any) -> None:
    """The digest of a data set depends on its prompts alone."""
    hub.tables["o/n", None, "train"] = hub.tables["o/n", None, "test"] = [{"text": "a"}]
    hub.tables["o/n", None, "other"] = [{"text": "b"}]
    assert load("hub:o/n").digest == load("hub:o/n:test").digest != load("hub:o/n:other").digest
    row = {"category": "uncategorised", "domain": "general", "id": "row-0", "max_new_tokens": None}
    content = json.dumps([{**row, "messages": None, "text": "a"}], sort_keys=True)
    assert load("hub:o/n").digest == hashlib.sha256(content.encode()).hexdigest()


def test_hub_refusals(hub: Any) -> None:
    """What a data set can do wrong is said in one line that names it."""
    hub.tables["o/gone", None, "train"] = hub.exceptions.DatasetNotFoundError("not on the Hub\nmore")
    hub.tables["o/off", None, "train"] = ConnectionError("Couldn't reach 'o/off'")
    hub.tables["o/n", None, "dev"] = ValueError('Unknown split "dev"')
    hub.tables["o/n", None, "train"] = [{"label": 1, "title": "x"}]
    hub.tables["o/n", None, "empty"] = []
    hub.tables["o/n", None, "bad"] = [{"prompt": "x"}, {"prompt": None}]
    assert "hub:o/gone: not found on the hub, or not public: not on the Hub" in refused("hub:o/gone").message
    assert "hub:o/off: cannot be loaded from the hub: Couldn't reach" in refused("hub:o/off").message
    assert 'Unknown split "dev"' in refused("hub:o/n:dev").message
    assert "has none of the columns prompt, messages, text" in refused("hub:o/n").message
    assert "no column 'titel'; did you mean 'title'?" in refused("hub:o/n:train:titel").message
    assert "the data set is empty" in refused("hub:o/n:empty").message
    assert "hub:o/n:bad, row 1: needs 'prompt'" in refused("hub:o/n:bad").message


@pytest.mark.parametrize("spec", ["hub:", "hub:a/b/c/d", "hub:a/b:train:x:y"])
def test_hub_spec(spec: str) -> None:
    """A malformed data set spec is refused before anything is imported."""
    assert f"cannot read '{spec}'" in refused(spec).message


# --- prompts and tokens -----------------------------------------------------------------------


class FakeTokenizer:
    """One token per character; a chat template that marks roles, if there is one."""

    def __init__(self, chat_template: str | None = None, wrap: Any = list) -> None:
        self.chat_template = chat_template
        self.wrap = wrap

    def __call__(self, text: str) -> Any:
        return {"input_ids": [ord(letter) for letter in text], "attention_mask": [1] * len(text)}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> Any:
        assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        if messages[0]["role"] == "system":
            from jinja2 import TemplateError

            raise TemplateError("System role not supported")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"
        return self.wrap([ord(letter) for letter in text])


HELLO = Prompt("p", "c", "d", messages=(Message(role="user", content="hi"),))


def spelled(ids: list[int]) -> str:
    """Read the fake tokenizer's ids back."""
    assert all(type(token) is int for token in ids)
    return "".join(map(chr, ids))


@pytest.mark.parametrize(
    "wrap",
    [
        list,
        np.array,
        lambda ids: [ids],
        lambda ids: {"input_ids": ids},
        lambda ids: {"input_ids": np.array([ids])},
        lambda ids: types.SimpleNamespace(ids=ids),
        lambda ids: [types.SimpleNamespace(ids=ids)],
    ],
)
def test_render_chat(wrap: Any) -> None:
    """Messages go through the chat template, whatever shape the tokenizer returns ids in."""
    assert spelled(HELLO.render(FakeTokenizer("yes", wrap))) == "<user>hi<assistant>"


def test_render_without_template() -> None:
    """Without a template, or with chat=False, messages are concatenated with empty lines."""
    assert spelled(HELLO.render(FakeTokenizer())) == "hi\n\n"
    assert spelled(HELLO.render(FakeTokenizer("yes"), chat=False)) == "hi\n\n"


def test_render_text() -> None:
    """A text to continue is tokenised as it is, template or not."""
    prompt = Prompt("p", "c", "d", text="Once ")
    assert spelled(prompt.render(FakeTokenizer("yes"))) == "Once "


def test_render_refused() -> None:
    """A template that refuses the messages gives an error that names the prompt."""
    prompt = Prompt("p", "c", "d", messages=(Message(role="system", content="x"), *(HELLO.messages or ())))
    with pytest.raises(WorkloadError, match="refuses prompt 'p': System role not supported"):
        prompt.render(FakeTokenizer("yes"))


def test_prompt_needs_one_content() -> None:
    """A prompt has either text or messages."""
    with pytest.raises(WorkloadError, match="either text or messages"):
        Prompt("p", "c", "d")
    with pytest.raises(WorkloadError, match="either text or messages"):
        Prompt("p", "c", "d", text="x", messages=HELLO.messages)


# --- loads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["c=1", "c=32", "poisson=0.7", "poisson=1.25", "rate=2/s", "rate=0.125/s"])
def test_label_round_trip(label: str) -> None:
    """A label that is read gives the same label."""
    assert Load.parse(label).label == label


@given(st.floats(min_value=1e-6, max_value=1e6))
def test_rates_round_trip(rate: float) -> None:
    """A label keeps every digit of a rate or a utilisation."""
    assert Load.parse(Load("poisson", rate=rate).label).rate == rate
    assert Load.parse(Load("poisson", utilisation=rate).label).utilisation == rate


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("", "no load ''"),
        ("8", "no load '8'"),
        ("posson=0.7", "did you mean 'poisson'"),
        ("c=", "expected a whole number after 'c='"),
        ("c=1.5", "expected a whole number"),
        ("c=0", "concurrency must be at least 1, not 0"),
        ("poisson=fast", "expected a number"),
        ("poisson=0.7/s", "expected a number"),
        ("poisson=0", "utilisation must be a positive number"),
        ("rate=nan/s", "rate must be a positive number"),
        ("rate=inf", "rate must be a positive number"),
    ],
)
def test_bad_label(label: str, message: str) -> None:
    """A label that means nothing is refused, and the hint shows the three forms."""
    with pytest.raises(WorkloadError, match=message.replace("(", r"\(")) as caught:
        Load.parse(label)
    assert "c=8" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("closed", {}),
        ("closed", {"rate": 1.0}),
        ("poisson", {"utilisation": 0.5, "rate": 1.0}),
        ("poisson", {"concurrency": 2}),
    ],
)
def test_contradictory_load(kind: Literal["closed", "poisson"], numbers: dict[str, Any]) -> None:
    """A load with no number, two numbers or the wrong one is refused."""
    with pytest.raises(WorkloadError, match="cannot be made from"):
        Load(kind, **numbers)


def test_poisson_arrivals() -> None:
    """Arrivals increase, and their gaps have the mean and the spread of an exponential distribution."""
    times = poisson_arrivals(20_000, rate=4.0, seed=1)
    gaps = np.diff([0.0, *times])
    assert (gaps > 0).all()
    standard_error = 0.25 / math.sqrt(20_000)
    assert abs(gaps.mean() - 0.25) < 4 * standard_error
    assert gaps.std() == pytest.approx(0.25, rel=0.05)


def test_poisson_is_reproducible() -> None:
    """A seed fixes the arrivals, and fewer of them are the first of more."""
    assert poisson_arrivals(5, 2.0, seed=3) == poisson_arrivals(50, 2.0, seed=3)[:5]
    assert poisson_arrivals(5, 2.0, seed=3) != poisson_arrivals(5, 2.0, seed=4)
    assert poisson_arrivals(0, 2.0, seed=3) == []


@pytest.mark.parametrize(("num", "rate"), [(-1, 1.0), (5, 0.0), (5, math.nan), (5, math.inf)])
def test_bad_arrivals(num: int, rate: float) -> None:
    """A negative number of arrivals and a rate that is not positive are refused."""
    with pytest.raises(WorkloadError, match="must"):
        poisson_arrivals(num, rate, seed=0)
