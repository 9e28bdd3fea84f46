"""What every request of a run is asked for: `--sampling` read, built and refused; `--samples` at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import CONTEXT, collect, copied, perturbed, shared

from specbench.bench.matrix import Encoded, Unit, schedule
from specbench.bench.sampling import build_sampling, parse_sampling
from specbench.bench.store import RunStore
from specbench.cli import main
from specbench.engines.local import LocalEngine
from specbench.errors import UsageError
from specbench.records import SamplingParams
from specbench.workloads import Load

Captured = pytest.CaptureFixture[str]


def letters(text: str) -> list[int]:
    """Encode a as 0, b as 1, and so on."""
    return [ord(letter) - ord("a") for letter in text]


# Reading and building


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("top_k=5", "top_k", 5),
        ("top-k= 5", "top_k", 5),
        ("top_p=.9", "top_p", 0.9),
        ("min_p=0.05", "min_p", 0.05),
        ("repetition_penalty=1.1", "repetition_penalty", 1.1),
        ("presence_penalty=-1", "presence_penalty", -1.0),
        ("frequency-penalty=0.2", "frequency_penalty", 0.2),
        ('logit_bias={"4": -100, "2": 1.5}', "logit_bias", ((4, -100.0), (2, 1.5))),
        ("bad_words=cab", "bad_words", ((2, 0, 1),)),
        ('bad_words=["cab", [5, 7]]', "bad_words", ((2, 0, 1), (5, 7))),
        ("min_new_tokens=3", "min_new_tokens", 3),
        ("ignore_eos=yes", "ignore_eos", True),
        ("ignore_eos=false", "ignore_eos", False),
        ("stop_token_ids=7", "stop_token_ids", (7,)),
        ("stop_token_ids=[7, 8]", "stop_token_ids", (7, 8)),
        ("stop_strings=END", "stop_strings", ("END",)),
        ("stop_strings=a=b", "stop_strings", ("a=b",)),
        ('stop_strings="\\n"', "stop_strings", ("\n",)),
        ('stop_strings=["a", "b"]', "stop_strings", ("a", "b")),
        ("grammar=regex:[0-9]+", "grammar", "regex:[0-9]+"),
    ],
)
def test_a_setting_reaches_the_request(text: str, name: str, value: Any) -> None:
    """What is written for a parameter is what a request gets, and nothing else changes."""
    built = build_sampling(parse_sampling([text]), encode=letters, max_new_tokens=9)
    assert built == SamplingParams(max_new_tokens=9, **{name: value})


def test_settings_add_up_and_the_request_goes_first() -> None:
    """Several settings make one set; what a request has of its own replaces what was asked for."""
    asked = parse_sampling(["top_k=5", "grammar=regex:[0-9]+"])
    built = build_sampling(asked, encode=letters, max_new_tokens=9, grammar='choice:["a"]', seed=3)
    assert (built.top_k, built.grammar, built.seed) == (5, 'choice:["a"]', 3)
    least = build_sampling(parse_sampling(["min_new_tokens=20"]), encode=letters, max_new_tokens=9)
    assert least.min_new_tokens == 9  # a prompt with a shorter answer is not refused


REFUSED = [
    ("top_k", "expected NAME=VALUE"),
    ("=5", "expected NAME=VALUE"),
    ("tpo_k=5", "did you mean 'top_k'?"),
    ("temperature=1", "use --temperature"),
    ("max-new-tokens=4", "use --max-new-tokens"),
    ("seed=4", "use --seed"),
    ("logprobs=3", "no report shows them"),
    ("order=[]", "every engine has its own"),
    ("top_k=", "expected a whole number"),
    ("top_k=1.5", "expected a whole number"),
    ("top_k=-1", "0 or more"),
    ("top_p=high", "expected a number"),
    ("top_p=0", "top_p is 0.0; expected above 0 and at most 1"),
    ("top_p=nan", "top_p is nan"),
    ("frequency_penalty=inf", "expected a finite number"),
    ("ignore_eos=maybe", "expected true or false"),
    ("logit_bias=[1]", "expected biases"),
    ('logit_bias={"a": 1}', "expected biases"),
    ('logit_bias={"1": "x"}', "expected biases"),
    ('logit_bias={"1": NaN}', "finite bias"),
    ("bad_words=[5]", "expected words"),
    ('bad_words=[""]', "expected words"),
    ("bad_words=[[1.5]]", "expected words"),
    ("bad_words=[", "expected words"),
    ("stop_token_ids=x", "expected token ids"),
    ("stop_token_ids=[-1]", "expected token ids"),
    ("stop_token_ids=[true]", "expected token ids"),
    ("stop_strings=", "expected texts"),
    ("stop_strings=[5]", "expected texts"),
    ("grammar=rgx:a", "did you mean 'regex'?"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_what_has_no_meaning_is_refused(text: str, words: str) -> None:
    """A wrong name or value is named in one line with what was expected."""
    with pytest.raises(UsageError) as caught:
        parse_sampling([text])
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_setting_given_twice_is_refused() -> None:
    """The last one does not silently win."""
    with pytest.raises(UsageError, match="top_k is given twice"):
        parse_sampling(["top_k=5", "top-k=6"])


# Samples


@pytest.mark.parametrize("concurrency", [1, 2])
def test_samples_share_one_prefill(concurrency: int) -> None:
    """N samples of each prompt cost one prefill of it, and their outputs differ."""
    engine = LocalEngine(
        copied(shared("llama"), "sdpa"),
        eos_ids=(),
        draft=perturbed(shared("llama"), 0.1),
        rows=8,
        width=CONTEXT,
    )
    engine.open("draft:k=3")
    prompts = tuple(
        Encoded(f"p{i}", tokens, 12) for i, tokens in enumerate([(3, 1, 4, 1), (2, 7), (5, 5, 6)])
    )
    unit = Unit("w", 1.0, Load.parse(f"c={concurrency}"), 0, 0, prompts)
    offered = schedule(unit, seed=0, rate=None, again=False, samples=4)
    served = collect(engine.serve(offered))
    prefills = [step for step in served.steps if step.phase == "prefill"]
    assert sum(step.tokens_in - step.tokens_padded for step in prefills) == 4 + 2 + 3
    assert sum(step.batch for step in prefills) == 12
    assert max(step.batch for step in served.steps) == 4 * concurrency
    for index, prompt in enumerate(prompts):
        records = [served.records[4 * index + sample] for sample in range(4)]
        assert {record.prompt_id for record in records} == {prompt.id}
        assert len({record.output_tokens for record in records}) == 4


# The command


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder with a file of three prompts."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abcab", "d", "efgef")))
    return path


def measure(saved_model: Path, prompts: Path, *words: str) -> int:
    return main(
        ["run", "--target", str(saved_model / "target"), "--dtype", "float32", "--workload", str(prompts),
         "--strategy", "ngram:k=3,min=1", "--max-new-tokens", "8", "--temperature", "1", "--no-audit",
         "--run-id", "run", *words]
    )  # fmt: skip


def test_a_run_asks_every_request(saved_model: Path, prompts: Path, capsys: Captured) -> None:
    """Settings and samples reach every request, are stored, and are printed under the table."""
    words = ("--sampling", "top_k=3", "--sampling", "bad_words=ab", "--samples", "4", "--load", "c=1")
    assert measure(saved_model, prompts, *words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "4 samples of a prompt at once" in out
    assert "top_k=3 and bad_words=ab in every request" in out
    store = RunStore.open(Path("results/run"))
    assert store.document.config["samples"] == 4
    assert store.document.config["sampling"] == ["top_k=3", "bad_words=ab"]
    for cell in store.cells():
        records = [record for serving in cell.servings for record in serving.requests]
        assert len(records) == 12
        assert {record.sampling.top_k for record in records} == {3}
        (word,) = {record.sampling.bad_words for record in records}
        assert len(word[0]) == 2
        pairs = {pair for r in records for pair in zip(r.output_tokens, r.output_tokens[1:], strict=False)}
        assert word[0] not in pairs


def test_a_share_of_the_capacity_counts_prompts(prompts: Path, capsys: Captured) -> None:
    """With four samples of each prompt, half the load is half the prompts a second, not half the requests."""
    prompts.write_text("".join(json.dumps({"prompt": "x" * n}) + "\n" for n in range(1, 41)))
    command = [
        "run", "--engine", "simulated", "--workload", str(prompts), "--max-new-tokens", "11",
        "--samples", "4", "--temperature", "0", "--load", "c=1", "--load", "poisson=0.5",
        "--strategy", "ordinary", "--run-id", "run",
    ]  # fmt: skip
    assert main(command) == 0
    err = capsys.readouterr().err
    assert "100 % (640 of 640)" in err  # two arms, two loads, 40 prompts, 4 samples
    cells = {str(cell.key): cell for cell in RunStore.open(Path("results/run")).cells()}
    closed, offered = (cells[f"prompts T=0 {load} ordinary"] for load in ("c=1", "poisson=0.5"))
    took = sum(serving.duration_s for serving in closed.servings)
    last = max(record.arrival for serving in offered.servings for record in serving.requests)
    assert 1.3 < last / took < 3.0  # forty exponential gaps of twice the time a prompt took


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sampling", "tpo_k=3"], "did you mean 'top_k'?"),
        (["--sampling", "stop_token_ids=24"], "names token 24;"),
        (["--sampling", 'logit_bias={"99": 1}'], "names token 99;"),
        (["--sampling", "grammar=regex:[0-9]"], "grammar"),
        (["--sampling", "grammar=regex:[0-9]", "--sampling", "min_new_tokens=2"], "beside a grammar"),
        (["--samples", "0"], "--samples: expected 1 or more"),
        (["--samples", "9", "--rows", "8"], "--samples 9 of a prompt are decoded together, and --rows is 8"),
    ],
)
def test_what_the_run_cannot_do_is_refused_before_it(
    saved_model: Path, prompts: Path, capsys: Captured, words: list[str], message: str
) -> None:
    """One line, exit code 2, and no run folder."""
    assert measure(saved_model, prompts, *words) == 2
    error = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert message in error
    assert not Path("results/run").exists()
