"""The audit of a decoder of which only the outputs are known: another engine, called as a function.

What `session` does for strategies of our own, without rounds, draft records or regimes: outputs are scored
whole and in the order of submission, by the reference alone. Draft laws are the auditor's: of the draft
model if there is one, else a synthetic one near the target. Two streams whose answer is known, drawn by the
reference itself, are judged by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.audit import regimes
from specbench.audit.alternatives import DIRECTIONS, Plan, Scores
from specbench.audit.betting import smallest_share
from specbench.audit.budget import Budget, Control, Speculation, alpha_for, combine
from specbench.audit.collisions import Collisions
from specbench.audit.draft_laws import DraftLaw, SyntheticLaw
from specbench.audit.e_process import EProcess, sequence_numbers
from specbench.audit.greedy_regret import NULL_RATE, GreedyRegret, Tolerance, divergence, regrets
from specbench.audit.lossless_result import GreedyFindings, LosslessResult
from specbench.audit.plain_sampling import PlainSampler
from specbench.audit.recollection import Recollection
from specbench.audit.reference import Oracle
from specbench.audit.session import FLOAT32_REGRET, LARGEST_REGRET, PLAN_LEAST, PLAN_VOCAB
from specbench.audit.support import Margin, zones_of_emitted
from specbench.audit.verdicts import ComponentResult, EffectRecord
from specbench.errors import UsageError
from specbench.records import SamplingParams

Generate = Callable[[list[list[int]], SamplingParams], Sequence[Sequence[int]]]
Progress = Callable[[int, int], None]
"""Told how many tokens have been scored, and how many the budget has."""

Text = tuple[int, ...]
STREAM = "outputs"
STREAMS = 8
"""Uses of random numbers of the reference's own."""
CONTROL_TOKENS = 4_000
CONTROL_ROWS = 128
"""Outputs drawn by the reference at a time: prompts of one length share a batch."""
HOTTER = 1.5
"""The fault planted in the second control: sampled at a temperature this many times too high."""
WARM_UP = 8
"""Outputs per prompt on which the synthetic draft's noise is set; they are not audited."""
MOST_WARM_UP = 64
WARM_UP_ROWS = 512
WAITING_VALUES = 4_000_000
"""Probabilities kept until they are scored [rows * vocab], twice: 64 MB in float64."""
EXTENSIONS = (0, 5, 11, 18)
"""Greedy outputs repeat for a prompt that repeats, so prompts are continued by this many sampled tokens."""
GREEDY_PART = 4
"""An audit of what is sampled spends one in so many tokens more on temperature 0, where that is asked for."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is audited, on what, and how hard; `specbench.testing` has checked it.

    Args:
        sampling: as given to `generate`, but for the seed, which is another in every call. At temperature 0
            the audit is of greedy decoding.
        ends: tokens that end an output.
        draft: a causal model or a `DraftLaw`; None puts a synthetic one in its place.
        batch: prompts in one call.
        also_greedy: decode at temperature 0 too.
        speculated: returns (drafted, accepted) since the beginning.
    """

    name: str
    generate: Generate
    model: Any
    sampling: SamplingParams
    prompts: tuple[Text, ...]
    ends: tuple[int, ...]
    budget: Budget
    alpha: float
    seed: int
    batch: int
    draft: Any = None
    also_greedy: bool = False
    speculated: Callable[[], tuple[int, int]] | None = None
    progress: Progress = lambda scored, planned: None

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is sampled."""
        return self.sampling.temperature == 0

    @property
    def vocab(self) -> int:
        """The number of tokens that the target knows."""
        return int(self.model.config.get_text_config().vocab_size)

    def level(self, test: str) -> float:
        """Return the level of one test."""
        return alpha_for(test, setting="in process", strategies=1, run_alpha=self.alpha)


class ModelLaw:
    """The law of a draft model, by plain forwards along the output; see `DraftLaw`."""

    def __init__(self, model: Any, sampling: SamplingParams, ends: Sequence[int]) -> None:
        self.oracle = Oracle(model, sampling, ends)
        self.vocab = int(model.config.get_text_config().vocab_size)

    def laws(self, prompt: Sequence[int], output: Sequence[int], target_logits: Tensor, p: Tensor) -> Tensor:
        """Return q. Heads may be padded to different sizes: what the draft does not know, it never drafts."""
        read = [[min(token, self.vocab - 1) for token in text] for text in (prompt, output)]
        logits = next(self.oracle.rows(read[0], [read[1]]))[1][:, : p.shape[-1]].to(target_logits.device)
        logits = torch.nn.functional.pad(logits, (0, p.shape[-1] - logits.shape[-1]), value=-torch.inf)
        return self.oracle.law(logits, prompt, output)


# Outputs


def checked(
    outputs: Sequence[Sequence[int]], prompts: Sequence[Text], subject: Subject, most: int
) -> tuple[list[Text], str | None]:
    """Return a call's outputs as tuples, and what is wrong with them that a decoder must not do.

    Raises:
        UsageError: they are not outputs as they were asked for, so that nothing can be said of the decoder.
    """
    try:
        found = [_ids(output) for output in outputs]
    except TypeError:
        raise UsageError(
            f"{subject.name} did not return lists of token ids",
            hint="return list[list[int]], new tokens only",
        ) from None
    if len(found) != len(prompts):
        raise UsageError(
            f"{subject.name} returned {len(found)} outputs to {len(prompts)} prompts",
            hint="return one output per prompt, in the order of the prompts",
        )
    broken = None
    for output, prompt in zip(found, prompts, strict=True):
        _require_output(output, prompt, subject, most)
        broken = broken or _broken_contract(output, subject, most)
    return found, broken


def _ids(output: Any) -> Text:
    """Return token ids as a tuple; tensors and arrays are read too."""
    values = output.tolist() if hasattr(output, "tolist") else output
    if isinstance(values, str | bytes) or not all(
        hasattr(token, "__index__") and not isinstance(token, bool) for token in values
    ):
        raise TypeError
    return tuple(int(token) for token in values)


def _require_output(output: Text, prompt: Text, subject: Subject, most: int) -> None:
    """Refuse what is no output: empty, foreign ids, the prompt in front, padding behind, EOS cut off."""
    name, ends = subject.name, subject.ends
    if not output:
        raise UsageError(f"{name} returned an empty output", hint="return every new token, the EOS included")
    if (worst := max(output)) >= subject.vocab or min(output) < 0:
        foreign = worst if worst >= subject.vocab else min(output)
        raise UsageError(
            f"{name} returned the token id {foreign}; expected 0 to {subject.vocab - 1}",
            hint="return ids of the target's vocabulary, without padding",
        )
    if len(output) > most and output[: len(prompt)] == prompt:
        raise UsageError(f"an output of {name} begins with its prompt", hint="return the new tokens only")
    first = next((place for place, token in enumerate(output) if token in ends), None)
    if first is None:
        if len(output) < most:
            raise UsageError(
                f"an output of {name} has {len(output)} tokens and no EOS at its end; expected {most} "
                f"tokens, or EOS ({', '.join(map(str, ends)) or 'none is known'})",
                hint="return the EOS too: whether it comes is part of what is audited; or pass eos_ids=",
            )
        return
    behind = set(output[first + 1 :])
    padding = getattr(subject.model.generation_config, "pad_token_id", None)
    if len(output) > first + 1 and (behind <= {padding} or behind <= {output[first]}):
        raise UsageError(f"an output of {name} is padded behind its EOS", hint="cut outputs behind the EOS")


def _broken_contract(output: Text, subject: Subject, most: int) -> str | None:
    """Say what an output holds that no decoder may emit, whatever the law."""
    if len(output) > most:
        return f"an output has {len(output)} tokens; max_new_tokens was {most}"
    if any(token in subject.ends for token in output[:-1]):
        return "an output goes on behind its EOS"
    return None


# Evidence


class Sampled:
    """What the outputs of one decoder say about the law they were sampled from."""

    def __init__(self, subject: Subject, oracle: Oracle, law: DraftLaw) -> None:
        self.oracle = oracle
        self.law = law
        every = min(int(1 / PLAN_LEAST), max(1, subject.vocab // PLAN_VOCAB))
        self.e_process = EProcess({STREAM: True}, alpha=subject.level("e-process"), plan_every=every)
        self.collisions = Collisions(subject.level("collisions"))
        self.recollection = Recollection(subject.level("chi-squared"))  # which it stands in for
        self.margin = Margin(subject.level("support"))
        self.sequences = 0

    @property
    def tokens(self) -> int:
        """Tokens scored."""
        return self.e_process.tokens

    @property
    def alarm(self) -> bool:
        """Whether any test has alarmed."""
        companions = (self.collisions, self.recollection, self.margin)
        return self.e_process.is_rejected or any(test.mixture.alarm for test in companions)

    def take(self, prompts: Sequence[Text], outputs: Sequence[Text]) -> None:
        """Judge outputs in the order of their submission; forwards are shared by those of one prompt."""
        scores: dict[int, Scores] = {}
        chosen: dict[int, list[float]] = {}
        zone: dict[int, np.ndarray[Any, Any]] = {}
        plan = self.e_process.alternatives(STREAM).empty_plan()
        waiting: list[tuple[int, Tensor, Tensor]] = []

        def score() -> Plan:
            """Score what waits: together, since each call costs as much as many rows."""
            places, p, q = zip(*waiting, strict=True)
            waiting.clear()
            found, planned = self._scored([outputs[place] for place in places], torch.cat(p), torch.cat(q))
            scores.update(zip(places, found, strict=True))
            return planned

        texts = list(zip(prompts, outputs, strict=True))
        for place, logits in self.oracle.along(texts):
            p = self.oracle.law(logits, *texts[place]).cpu()
            q = self.law.laws(*texts[place], logits, p).cpu()
            chosen[place] = p.gather(1, torch.tensor(outputs[place])[:, None]).squeeze(1).tolist()
            zone[place] = zones_of_emitted(self.oracle, chosen[place], logits, *texts[place])
            waiting.append((place, p, q))
            if sum(law.numel() for _, law, _ in waiting) > WAITING_VALUES:
                plan = plan + score()
        plan = plan + score() if waiting else plan
        numbers, offsets = sequence_numbers([len(output) for output in outputs])
        ordered = [scores[place] for place in range(len(outputs))]
        together = Scores(*(np.concatenate([getattr(s, n) for s in ordered]) for n in Scores.__slots__))
        self.e_process.update(STREAM, together, self.sequences + numbers, offsets, plan)
        for place, output in enumerate(outputs):
            likelihoods = chosen[place]
            log_p = math.fsum(map(math.log, likelihoods)) if all(likelihoods) else -math.inf
            self.collisions.add(prompts[place], output, min(0.0, log_p))
            self.recollection.add(prompts[place], output, likelihoods)
            self.margin.add(zone[place])
        self.sequences += len(outputs)

    def _scored(self, outputs: Sequence[Text], p: Tensor, q: Tensor) -> tuple[list[Scores], Plan]:
        """Return the scores of each output, and what their contexts could have shown."""
        alternatives, every = self.e_process.alternatives(STREAM), self.e_process.plan_every
        scores = alternatives.score(p, torch.tensor([token for output in outputs for token in output]), q)
        stops = np.cumsum([len(output) for output in outputs])
        parts = [
            scores.take(slice(stop - len(output), stop)) for stop, output in zip(stops, outputs, strict=True)
        ]
        return parts, alternatives.plan(p[::every], q[::every])

    def components(self) -> list[ComponentResult]:
        """Return what each test found; shared random numbers first: they upset the other tests too."""
        own = self.e_process.result().component()
        return [self.collisions.result(), self.margin.result(), own, self.recollection.result()]


class Greedy:
    """What the outputs of one decoder at temperature 0 say, token by token, and where each first differs."""

    def __init__(self, subject: Subject, alpha: float) -> None:
        self.alpha = alpha
        plain = replace(subject.sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        self.oracle = Oracle(subject.model, plain, subject.ends)
        self.limit = Tolerance(FLOAT32_REGRET, 0.0, 10**9, FLOAT32_REGRET)
        self.regret = GreedyRegret(alpha, self.limit)
        self.sequences = 0
        self.kinds = {"near-tie": 0, "real": 0}
        self.first_real: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens scored."""
        return self.regret.mixture.steps

    @property
    def alarm(self) -> bool:
        """Whether too many tokens are not the most likely ones."""
        return self.regret.mixture.alarm

    def take(self, prompts: Sequence[Text], outputs: Sequence[Text]) -> None:
        """Judge outputs in the order of their submission."""
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = next(self.oracle.rows(prompt, [output]))[1]
            scores = self.oracle.law(logits, prompt, output).log().cpu().numpy()
            self.regret.add(np.minimum(regrets(scores, np.array(output)), LARGEST_REGRET))
            self._compare(output, scores)
            self.sequences += 1

    def _compare(self, output: Text, scores: np.ndarray[Any, Any]) -> None:
        """Class the first difference from the reference's greedy output, if there is one.

        Up to it both have one context, so the other token is the likeliest there: nothing need be decoded.
        """
        likeliest = scores.argmax(1).tolist()
        found = divergence(output, likeliest, scores, self.limit)
        if found is None or found.kind == "length" or found.logits is None:
            return
        self.kinds[found.kind] += 1
        if found.kind == "real" and self.first_real is None:
            (one, other), (log_p, other_log_p) = found.tokens, found.logits
            self.first_real = (
                f"output {self.sequences}, token {found.position}: {one} at log p {log_p:.4f}, "
                f"where the reference has {other} at {other_log_p:.4f}"
            )

    def findings(self) -> GreedyFindings:
        """Return what was found, in numbers."""
        return GreedyFindings(
            tokens=self.tokens,
            exceeded=self.regret.exceeded,
            largest=self.regret.largest,
            tolerance=self.limit.value,
            outputs=self.sequences,
            near_ties=self.kinds["near-tie"],
            real=self.kinds["real"],
            first_real=self.first_real,
        )

    def components(self) -> list[ComponentResult]:
        """Return what the test found."""
        return [self.regret.result()]


# The audit


class Auditor:
    """The state of one audit."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        sampling = subject.sampling if not subject.is_greedy else replace(subject.sampling, temperature=1.0)
        self.oracle = Oracle(subject.model, sampling, subject.ends)
        self.broken: str | None = None
        self.calls = 0

    def examine(self) -> LosslessResult:
        """Judge the decoder, then the controls, and conclude. A broken contract needs no control."""
        subject = self.subject
        subject.progress(0, subject.budget.tokens)
        controls: list[Control] = []
        sampled = greedy = None
        if not subject.is_greedy:
            law = self._draft_law()
            sampled = Sampled(subject, self.oracle, law)
            self._spend(sampled, self._repeated(), subject.sampling, subject.budget.tokens)
            if self.broken is None:
                controls += self._sampled_controls(law)
        if subject.is_greedy or (subject.also_greedy and not (self.broken or (sampled and sampled.alarm))):
            alpha = subject.alpha if subject.is_greedy else subject.level("greedy regret")
            greedy = Greedy(subject, alpha)
            asked = replace(subject.sampling, temperature=0.0)
            tokens = subject.budget.tokens if subject.is_greedy else subject.budget.tokens // GREEDY_PART
            self._spend(greedy, self._extended(0), asked, tokens)
            if self.broken is None:
                controls += self._greedy_controls(alpha)
        return self._conclude(sampled, greedy, controls)

    def _spend(
        self, evidence: Sampled | Greedy, prompts: Iterator[Text], sampling: SamplingParams, tokens: int
    ) -> None:
        """Have the decoder go on from prompts until the tokens are spent, or an alarm."""
        subject = self.subject
        while evidence.tokens < tokens and not evidence.alarm:
            asked = [next(prompts) for _ in range(subject.batch)]
            self.calls += 1
            seeded = replace(sampling, seed=subject.seed * 1_000_003 + self.calls)
            found = subject.generate([list(prompt) for prompt in asked], seeded)
            outputs, self.broken = checked(found, asked, subject, sampling.max_new_tokens)
            if self.broken:
                return
            evidence.take(asked, outputs)
            subject.progress(evidence.tokens, tokens)

    def _sampler(self, oracle: Oracle, stream: int) -> PlainSampler:
        """Return a sampler with random numbers that no other use has, in this audit or under another seed."""
        return PlainSampler(oracle, self.subject.seed * STREAMS + stream)

    # Prompts

    def _repeated(self) -> Iterator[Text]:
        """Yield the prompts over and over: copies of one output show only where a prompt comes again."""
        while True:
            yield from self.subject.prompts

    def _extended(self, stream: int) -> Iterator[Text]:
        """Yield prompts, then prompts continued by the reference, each time anew."""
        sampler = self._sampler(self.oracle, stream)
        while True:
            for length in EXTENSIONS:
                grown = sampler.draw(self.subject.prompts, length)
                for prompt, more in zip(self.subject.prompts, grown, strict=True):
                    kept = more[:-1] if more and more[-1] in self.oracle.ends else more
                    yield (*prompt, *kept)

    def _draft_law(self) -> DraftLaw:
        """Return the auditor's q: the draft's, or a synthetic one of a middling acceptance."""
        subject = self.subject
        if subject.draft is None:
            return SyntheticLaw(self.oracle, self._noise())
        if hasattr(subject.draft, "laws"):
            law: DraftLaw = subject.draft
            return law
        return ModelLaw(subject.draft, subject.sampling, subject.ends)

    def _noise(self) -> float:
        """Set the noise of the synthetic draft on outputs that are not audited."""
        sampler = self._sampler(self.oracle, 1)
        prompts = (self.subject.prompts * WARM_UP)[:MOST_WARM_UP]
        drawn = sampler.draw(prompts, WARM_UP)
        rows = [next(self.oracle.rows(p, [o]))[1] for p, o in zip(prompts, drawn, strict=True)]
        logits = torch.cat(rows)[:WARM_UP_ROWS].cpu()

        def process(values: Tensor) -> Tensor:
            # Without penalties: the noise decides only how far the synthetic draft is from the target.
            return Oracle(self.subject.model, _shape(self.oracle.sampling)).law(values, (), ())

        return regimes.calibrate(logits, regimes.ACCEPTANCE["good"], process=process)

    # Controls

    def _sampled_controls(self, law: DraftLaw) -> list[Control]:
        """Judge the reference's own sampling, as asked and too hot, as if a decoder had drawn it."""
        subject, sampling = self.subject, self.subject.sampling
        hotter = replace(sampling, temperature=HOTTER * sampling.temperature)
        honest = self._sampler(self.oracle, 2)
        hot = self._sampler(Oracle(subject.model, hotter, subject.ends), 3)
        same, other = (Sampled(subject, self.oracle, law) for _ in range(2))
        return [
            Control("plain sampling", False, self._control(same, honest, self._repeated())),
            Control(
                f"sampling at {HOTTER:g} times the temperature",
                True,
                self._control(other, hot, self._repeated(), subject.budget.tokens),
            ),
        ]

    def _greedy_controls(self, alpha: float) -> list[Control]:
        """Judge the reference's own greedy decoding, and sampling passed off as that."""
        subject = self.subject
        same, other = Greedy(subject, alpha), Greedy(subject, alpha)
        asked = replace(subject.sampling, temperature=0.0)
        honest = self._sampler(Oracle(subject.model, asked, subject.ends), 4)
        sampling = self._sampler(self.oracle, 5)
        return [
            Control(
                "plain greedy decoding",
                False,
                self._control(same, honest, self._extended(6)),
            ),
            Control(
                "sampling instead of greedy",
                True,
                self._control(other, sampling, self._extended(7)),
            ),
        ]

    def _control(
        self,
        evidence: Sampled | Greedy,
        sampler: PlainSampler,
        prompts: Iterator[Text],
        tokens: int = CONTROL_TOKENS,
    ) -> bool:
        """Return whether a stream drawn by the reference alarms within some tokens, at most the budget's."""
        most = self.subject.sampling.max_new_tokens
        tokens = min(tokens, self.subject.budget.tokens)
        while evidence.tokens < tokens and not evidence.alarm:
            asked = [next(prompts) for _ in range(CONTROL_ROWS)]
            evidence.take(asked, sampler.draw(asked, most))
        return evidence.alarm

    # The verdict

    def _conclude(
        self, sampled: Sampled | None, greedy: Greedy | None, controls: Sequence[Control]
    ) -> LosslessResult:
        subject = self.subject
        judged: list[Sampled | Greedy] = [part for part in (sampled, greedy) if part is not None]
        tokens = sum(part.tokens for part in judged)
        components = [_contract(self.broken, tokens), *(c for part in judged for c in part.components())]
        detectable: dict[str, float | None] = {}
        if sampled is not None:
            found = sampled.e_process.result().detectable
            detectable = {self._shown(name): d.hidden for name, d in found.items() if d is not None}
        if greedy is not None:
            detectable["wrong greedy token"] = smallest_share(greedy.tokens, NULL_RATE, greedy.alpha)
        proof, words = self._speculation()
        conclusion = combine(
            [c for c in components if c.tokens or c.alarm],
            alpha=subject.alpha,
            claims_lossless=True,
            speculates=proof is not None,
            speculation=proof or Speculation(0, 0, 0),
            controls=controls,
            smallest_detectable=detectable,
            promised_tv=subject.budget.promised_tv,
        )
        alarms = [c for c in components if c.alarm and c.kind == "log e"]
        primary = [c for c in components if c.name in ("e-process", "greedy regret")]
        decisive = (alarms or primary)[0]
        e_found = sampled.e_process.result() if sampled is not None else None
        effect = e_found.regimes[0].effect if e_found is not None else None
        return LosslessResult(
            name=subject.name,
            verdict=conclusion.verdict,
            reasons=conclusion.reasons,
            components=tuple(components),
            controls=tuple(controls),
            budget=subject.budget.name,
            promised_tv=subject.budget.promised_tv,
            tokens=tokens,
            sequences=sum(part.sequences for part in judged),
            prompts=len(subject.prompts),
            log_e=decisive.evidence or 0.0,
            bar=-math.log(decisive.alpha),
            tokens_at_alarm=_alarm_at(sampled, greedy),
            family=e_found.best_family if e_found is not None else "greedy regret",
            alternative=e_found.best_alternative if e_found is not None else "wrong greedy token",
            effect=EffectRecord(effect.direction, effect.tv, effect.low, effect.high) if effect else None,
            detectable=detectable,
            greedy=greedy.findings() if greedy is not None else None,
            speculation=words,
            speculation_proved=None if proof is None else proof.missing is None,
        )

    def _shown(self, direction: str) -> str:
        """Return a direction's name, marked where the draft it is about only stands in for the real one."""
        needs_draft = next(d.needs_draft for d in DIRECTIONS if d.name == direction)
        return f"{direction} (stand-in draft)" if needs_draft and self.subject.draft is None else direction

    def _speculation(self) -> tuple[Speculation | None, str]:
        """Return what the caller says about drafts, and in words."""
        if self.subject.speculated is None:
            return None, "that anything was drafted is not proved: pass speculated="
        drafted, accepted = self.subject.speculated()
        if not 0 <= accepted <= drafted:
            raise UsageError(
                f"speculated() says that {accepted} of {drafted} drafted tokens were accepted",
                hint="return (drafted, accepted), counted since the audit began",
            )
        rate = f", {accepted / drafted:.0%}" if drafted else ""
        words = f"{accepted} of {drafted} drafted tokens were accepted{rate}"
        return Speculation(drafted, accepted, drafted - accepted), words


def examine(subject: Subject) -> LosslessResult:
    """Audit a decoder; nothing but an error in the call is raised."""
    return Auditor(subject).examine()


def _shape(sampling: SamplingParams) -> SamplingParams:
    """Return only what shapes a distribution."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        order=sampling.order,
    )


def _contract(broken: str | None, tokens: int) -> ComponentResult:
    words = broken or "every output ends where it must"
    return ComponentResult(
        "contracts", broken is not None, float(broken is not None), "exact", 0.0, tokens, words
    )


def _alarm_at(sampled: Sampled | None, greedy: Greedy | None) -> int | None:
    """Return after how many tokens the e-process, or else the regret, alarmed; None if neither did."""
    if sampled is not None and sampled.e_process.is_rejected:
        return sampled.e_process.result().tokens_at_alarm
    return greedy.regret.mixture.alarm_at if greedy is not None else None


def longest_prompt(prompts: Iterable[Sequence[int]], greedy: bool) -> int:
    """Return how long the longest prompt gets, with what greedy audits put behind it."""
    return max(map(len, prompts)) + (max(EXTENSIONS) if greedy else 0)
