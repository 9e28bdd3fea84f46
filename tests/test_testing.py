"""Auditing foreign decoders: right ones pass, broken ones are caught and named, bad calls are refused."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

from specbench import testing
from specbench.audit.betting import rare_event_factors, rare_event_mixture, smallest_share
from specbench.audit.plain_sampling import PlainSampler
from specbench.audit.reference import Oracle
from specbench.errors import UsageError
from specbench.testing import LosslessResult, SamplingParams, assert_lossless

pytest_plugins = ("pytester",)

EOS = 0
PROMPTS = [[3, 1, 4, 1, 5], [2, 6, 5, 3, 5], [8, 7, 8, 7, 8], [16, 11, 12, 13, 14], [10, 4]]
TOKENS = 1_500
"""Promises a TV of .127."""

Chosen = tuple[list[int], int]


@functools.cache
def target() -> Any:
    return tiny_models.build("llama", head=0.25)


@functools.cache
def draft() -> Any:
    return tiny_models.perturbed(target(), 0.25)


@torch.inference_mode()
def laws(model: Any, texts: Sequence[Sequence[int]], rows: int, temperature: float) -> Tensor:
    """Return the laws of the last `rows` rows of each text `[num, rows, V]`; filled up at the end."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    ends = torch.tensor([len(text) for text in texts])
    wanted = ends[:, None] - rows + torch.arange(rows)
    chosen = logits[torch.arange(len(texts))[:, None], wanted].double()
    if temperature == 0:
        return torch.nn.functional.one_hot(chosen.argmax(-1), chosen.shape[-1]).double()
    found: Tensor = (chosen / temperature).softmax(-1)
    return found


def drawn(law: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(law, 1, generator=generator))


def finished(output: list[int], most: int) -> bool:
    return len(output) >= most or EOS in output


def trimmed(output: list[int], most: int) -> list[int]:
    kept = output[:most]
    return kept[: kept.index(EOS) + 1] if EOS in kept else kept


@dataclass
class Ordinary:
    """One token per forward. `temperature` overrides what is asked for; `shared`: one stream for all rows."""

    temperature: float | None = None
    shared: bool = False

    def __call__(self, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
        """Decode in one batch."""
        seeds = [sampling.seed * 1000 + (0 if self.shared else row) for row in range(len(prompts))]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        heat = sampling.temperature if self.temperature is None else self.temperature
        outputs: list[list[int]] = [[] for _ in prompts]
        while left := [i for i, o in enumerate(outputs) if not finished(o, sampling.max_new_tokens)]:
            found = laws(target(), [prompts[i] + outputs[i] for i in left], 1, heat)
            for i, law in zip(left, found[:, 0], strict=True):
                outputs[i].append(drawn(law, generators[i]))
        return outputs


def standard(p: Tensor, q: Tensor, drafts: list[int], generator: torch.Generator) -> Chosen:
    """Return what one round emits by Leviathan et al. 2211.17192, and how many drafts were accepted."""
    for place, token in enumerate(drafts):
        if float(torch.rand((), generator=generator)) * float(q[place, token]) > float(p[place, token]):
            residual = (p[place] - q[place]).clamp_min(0)
            return [*drafts[:place], drawn(residual, generator)], place
    return [*drafts, drawn(p[len(drafts)], generator)], len(drafts)


def accept_all(p: Tensor, q: Tensor, drafts: list[int], generator: torch.Generator) -> Chosen:
    return [*drafts, drawn(p[len(drafts)], generator)], len(drafts)


def residual_from_p(p: Tensor, q: Tensor, drafts: list[int], generator: torch.Generator) -> Chosen:
    emitted, accepted = standard(p, q, drafts, generator)
    return [*emitted[:-1], drawn(p[accepted], generator)], accepted


@dataclass
class Speculative:
    """Three draft tokens a round, verified by `rule`."""

    rule: Callable[[Tensor, Tensor, list[int], torch.Generator], Chosen] = standard
    k: int = 3
    trim: Callable[[list[int], int], list[int]] = trimmed
    drafted: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)

    def __call__(self, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
        """Decode in one batch."""
        generator = torch.Generator().manual_seed(sampling.seed)
        outputs: list[list[int]] = [[] for _ in prompts]
        most = sampling.max_new_tokens
        while left := [i for i, o in enumerate(outputs) if not finished(o, most)]:
            texts = [prompts[i] + outputs[i] for i in left]
            q = []
            for _ in range(self.k):
                q.append(laws(draft(), texts, 1, sampling.temperature)[:, 0])
                tokens = torch.multinomial(q[-1], 1, generator=generator)[:, 0].tolist()
                texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
            p = laws(target(), texts, self.k + 1, sampling.temperature)
            for row, i in enumerate(left):
                own = torch.stack([law[row] for law in q])
                emitted, accepted = self.rule(p[row], own, texts[row][-self.k :], generator)
                outputs[i] += emitted
                self.drafted += self.k
                self.accepted += accepted
        return [self.trim(output, most) for output in outputs]

    def counts(self) -> tuple[int, int]:
        """Return (drafted, accepted)."""
        return self.drafted, self.accepted


def audited(generate: Any, sampling: SamplingParams | None = None, **options: Any) -> LosslessResult:
    """Audit a decoder of these tests."""
    settings = {"budget": TOKENS, "eos_ids": [EOS], "draft": draft(), **options}
    return testing.audit(generate, target(), None, PROMPTS, sampling, **settings)


# Right decoders


def test_ordinary_sampling_passes() -> None:
    """Ordinary sampling passes, and the result says that nothing proves speculation."""
    result = audited(Ordinary(), name="mine")
    assert result.verdict == "PASS", result.message
    assert result.tokens >= TOKENS
    assert result.speculation_proved is None
    assert "not proved" in result.message
    assert result.line.startswith("mine: PASS, log e ")
    direction, smallest = result.least_visible
    assert smallest is not None
    assert 0.02 < smallest <= result.promised_tv == 0.127
    assert direction in result.line


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0.8), SamplingParams(temperature=0.0)],
    ids=["sampled", "greedy"],
)
def test_speculative_sampling_passes(sampling: SamplingParams) -> None:
    """A correct speculative sampler passes, sampled and greedy, with speculation proved."""
    decoder = Speculative()
    result = audited(decoder, sampling, speculated=decoder.counts)
    assert result.verdict == "PASS", result.message
    assert result.speculation_proved is True
    assert [control.behaved for control in result.controls] == [True, True]
    if sampling.temperature == 0:
        assert result.greedy is not None
        assert (result.greedy.exceeded, result.greedy.real) == (0, 0)
        assert result.greedy.outputs > len(PROMPTS)


def test_without_a_draft_and_with_truncation() -> None:
    """Without a draft a synthetic one stands in; what is cut off and greedy decoding are judged as well."""
    decoder = truncated(SamplingParams(top_k=6))
    budget = testing.Budget("small", TOKENS, 0.25)
    asked = SamplingParams(top_k=6)
    result = audited(decoder, asked, budget=budget, draft=None, greedy=True, speculated=lambda: (9, 5))
    assert result.verdict == "PASS", result.message
    assert {"support", "greedy regret"} <= {component.name for component in result.components}
    assert len(result.controls) == 4


def truncated(own: SamplingParams) -> Any:
    """Return a decoder that samples by the reference's own means, whatever it is asked, but for greedy."""

    def decode(prompts: list[list[int]], sampling: SamplingParams) -> list[tuple[int, ...]]:
        heat = replace(own, temperature=sampling.temperature and own.temperature)
        sampler = PlainSampler(Oracle(target(), heat, (EOS,)), sampling.seed)
        return sampler.draw(prompts, sampling.max_new_tokens)

    return decode


# Broken ones


@pytest.mark.parametrize(
    ("decoder", "asked", "named"),
    [
        (Speculative(accept_all), SamplingParams(), "draft mix"),
        (Speculative(residual_from_p), SamplingParams(), "residual-from-p"),
        (Ordinary(temperature=1.0), SamplingParams(temperature=0.7), "temper-hot"),
        (Ordinary(temperature=1.0), SamplingParams(temperature=0.0), "greedy regret"),
        (Ordinary(shared=True), SamplingParams(), "share random numbers"),
        (truncated(SamplingParams()), SamplingParams(top_k=6), "outside the support"),
    ],
    ids=[
        "accept all",
        "residual from p",
        "temperature ignored",
        "greedy ignored",
        "one stream",
        "top-k ignored",
    ],
)
def test_broken_decoder_fails(decoder: Any, asked: SamplingParams, named: str) -> None:
    """A broken decoder fails, and what is said names the fault's family."""
    result = audited(decoder, asked)
    assert result.verdict == "FAIL"
    assert named in result.reasons[0] or named in result.alternative
    assert named in result.message


def test_large_fault_is_found_without_the_draft() -> None:
    """Drafts accepted untested are found though the draft is unknown, and directions of a stand-in say so."""
    result = audited(Speculative(accept_all), draft=None, budget=6_000)
    assert result.verdict == "FAIL"
    assert "continuations" in result.reasons[0] or "e-process" in result.reasons[0]
    assert "draft-mix (stand-in draft)" in result.detectable
    assert "temper-hot" in result.detectable


def test_greedy_difference_is_classed() -> None:
    """The first differences of a decoder that samples instead are real, and the first is shown."""
    result = audited(Ordinary(temperature=1.0), SamplingParams(temperature=0.0), budget=600)
    assert result.greedy is not None
    assert result.greedy.real > 0
    assert result.greedy.first_real is not None
    assert "where the reference has" in result.greedy.words


@pytest.mark.parametrize(
    ("trim", "words"),
    [
        (lambda output, most: output, "max_new_tokens was 32"),
        (lambda output, most: output[:most], "behind its EOS"),
    ],
    ids=["too long", "after EOS"],
)
def test_broken_contract_fails_at_once(trim: Any, words: str) -> None:
    """Tokens beyond the limit or the EOS fail without statistics."""
    asked = SamplingParams(ignore_eos=words.startswith("max"))
    decoder = Speculative(trim=lambda output, most: trim(output, most))
    if asked.ignore_eos:
        decoder = functools.partial(overrunning, decoder)  # type: ignore[assignment]
    result = audited(decoder, asked)
    assert result.verdict == "FAIL"
    assert words in result.reasons[0]


def overrunning(decoder: Speculative, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
    """Emit a whole round though the budget ended within it."""
    return [[1] * (sampling.max_new_tokens + 2) for _ in decoder(prompts, sampling)]


# What cannot be decided


def test_too_few_tokens_are_not_a_pass() -> None:
    """Silence below the promised sensitivity raises, unless that is allowed."""
    few = replace(testing.budget_of(600), promised_tv=0.01)
    settings: dict[str, Any] = {"budget": few, "eos_ids": [EOS], "draft": draft()}
    with pytest.raises(AssertionError, match="INCONCLUSIVE: too few tokens") as caught:
        assert_lossless(Ordinary(), target(), None, PROMPTS, **settings)
    assert caught.value.result.verdict == "INCONCLUSIVE"  # type: ignore[attr-defined]
    allowed = assert_lossless(Ordinary(), target(), None, PROMPTS, allow_inconclusive=True, **settings)
    assert allowed.verdict == "INCONCLUSIVE"


def test_nothing_drafted_is_not_a_pass() -> None:
    """A decoder that says it drafted nothing proved nothing."""
    result = audited(Ordinary(), budget=600, speculated=lambda: (0, 0))
    assert result.verdict == "INCONCLUSIVE"
    assert "nothing was drafted" in result.message


# Bad calls


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([], "empty output"),
        ([tiny_models.VOCAB] * 32, "token id 17; expected 0 to 16"),
        ([-1] * 32, "token id -1; expected 0 to 16"),
        ([1] * 5, "5 tokens and no EOS"),
        ([*PROMPTS[0], *[1] * 32], "begins with its prompt"),
        ([1, EOS, EOS, EOS], "padded behind its EOS"),
        ("text", "did not return lists of token ids"),
        ([0.5] * 32, "did not return lists of token ids"),
        (None, "did not return lists of token ids"),
    ],
    ids=["empty", "beyond", "negative", "no EOS", "prompt", "padding", "text", "floats", "none"],
)
def test_what_is_no_output_is_refused(output: Any, message: str) -> None:
    """What is no output of new tokens ends in one line that says what was expected."""
    with pytest.raises(UsageError, match=message) as caught:
        audited(lambda prompts, sampling: [output for _ in prompts])
    assert "\n" not in caught.value.message


def test_a_missing_output_is_refused() -> None:
    """One output per prompt is needed: whatever is left out may have been left out for what it said."""
    with pytest.raises(UsageError, match="31 outputs to 32 prompts"):
        audited(lambda prompts, sampling: Ordinary()(prompts[1:], sampling))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 100}, "100 tokens could show nothing"),
        ({"budget": "qick"}, "did you mean 'quick'"),
        ({"prompts": []}, "no prompts"),
        ({"prompts": ["text"]}, "no tokenizer"),
        ({"prompts": [[]]}, "a prompt is empty"),
        ({"prompts": [[99]]}, "ids that the target does not know"),
        ({"prompts": [[1] * 90]}, "take 122 tokens; the target reads 96"),
        ({"max_new_tokens": 4}, "fully accepted round"),
        ({"sampling": SamplingParams(stop_strings=("x",))}, "stop strings"),
        ({"target": object()}, "the target is a object"),
        ({"draft": "my-draft"}, "the draft is a str"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"speculated": lambda: (1, 2), "budget": 600, "eos_ids": [EOS]}, "2 of 1 drafted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_call_is_refused(changes: dict[str, Any], message: str) -> None:
    """A call that cannot be carried out ends in one line."""
    call = {"generate": Ordinary(), "target": target(), "tokenizer": None, "prompts": PROMPTS, **changes}
    with pytest.raises(UsageError, match=message):
        testing.audit(**call)


def test_a_target_in_low_precision_is_refused() -> None:
    """A rounding reference would accuse the innocent."""
    with pytest.raises(UsageError, match="in bfloat16"):
        testing.audit(Ordinary(), tiny_models.build("llama").to(torch.bfloat16), None, PROMPTS)


# Parts


def test_plain_sampling_is_ordinary_decoding() -> None:
    """The reference's greedy outputs are those of whole forwards; what is asked for the length is kept."""
    oracle = Oracle(target(), SamplingParams(temperature=0.0, min_new_tokens=6), (EOS,))
    outputs = PlainSampler(oracle, 1).draw(PROMPTS, 12)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = tiny_models.greedy(target(), prompt, len(output))
        kept = next((i for i, token in enumerate(expected[:6]) if token == EOS), len(output))
        assert list(output[:kept]) == expected[:kept]
        assert 6 < len(output) <= 12


@pytest.mark.parametrize("steps", [20, 1000])
def test_smallest_share_is_what_the_mixture_finds(steps: int) -> None:
    """The share is that at which the fewest events that alarm happen with probability .99."""
    from scipy import stats

    share = smallest_share(steps, 1e-4, 1e-3)
    assert share is not None

    def alarms(events: int) -> bool:
        mixture = rare_event_mixture(1e-3)
        mixture.multiply(rare_event_factors([False] * (steps - events) + [True] * events, 1e-4))
        return mixture.alarm

    fewest = next(events for events in range(steps) if alarms(events))
    assert stats.binom.sf(fewest - 1, steps, share) == pytest.approx(0.99)


# The plugin


SUITE = """
from test_testing import EOS, PROMPTS, Ordinary, target
from specbench.testing import SamplingParams

OPTIONS = {"eos_ids": [EOS], "max_new_tokens": 16}

def test_right(lossless):
    result = lossless(Ordinary(), target(), None, PROMPTS, name="right", **OPTIONS)
    assert result.budget == "700 tokens"

def test_broken(lossless):
    asked = SamplingParams(temperature=0.0)
    lossless(Ordinary(temperature=1.0), target(), None, PROMPTS, asked, name="broken", **OPTIONS)

def test_unrelated():
    pass
"""


def test_plugin(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture audits with the options of the command line, and the report ends with a line per audit."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_suite=SUITE)
    result = pytester.runpytest_inprocess(
        "-p", "specbench.pytest_plugin", "--specbench-budget=700", "--specbench-seed=3"
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: broken: FAIL: greedy regret: *",
            "*= specbench =*",
            "test_suite.py::test_*: PASS, log e * of 7.4, * tokens, smallest detectable TV 0.*",
        ]
    )
    result.stdout.fnmatch_lines(["test_suite.py::test_broken: broken: FAIL, log e * of 6.9, *"])


def test_plugin_loads_nothing() -> None:
    """A run of pytest that audits nothing does not pay for the plugin; neither module loads torch."""
    script = (
        "import sys, specbench.pytest_plugin; light = {'torch', 'transformers', 'numpy', 'scipy'}; "
        "first = light & set(sys.modules); import specbench.testing; "
        "sys.exit(' '.join(first | {'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (0, "")
