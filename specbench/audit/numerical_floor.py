"""What lower precision does to ordinary decoding by itself: the floor under everything that is judged in it.

The engine's own runner is led along texts that ordinary decoding wrote, at the batch sizes and widths that
decoding has, and each law is compared with the reference's after the same text. Nothing here is random but
the texts, nothing is drawn from these laws, and no speculation is involved: what differs is rounding.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.audit.alternatives import Alternatives
from specbench.audit.betting import FloatArray
from specbench.audit.draft_laws import DraftLaw
from specbench.audit.reference import Oracle
from specbench.audit.verdicts import FloorRow
from specbench.runtime.runner import ModelRunner

Text = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt, and what ordinary decoding wrote after it; all outputs of one measurement are equally long."""

HIGH = 0.99
MARGIN_FACTOR = 2.0
"""The margin is this many times the largest shift that was measured: contexts that are audited are others."""
ERRORS = 3.0
"""Standard errors, the text being the unit, that are added to a shift before that."""
SHIFTS_EVERY = 4
"""Shifts of sets are worked out along one text in so many; distances along all."""
FEW_TEXTS = 8
"""Texts that are also read alone, one row at a time: for what is shown. Audits decode in batches, and margins
are for those."""
LOGIT_VALUES = 200_000_000
"""Most logits kept at a time [rows * tokens * vocab], per width: 400 MB in bfloat16."""


def upcast(model: Any) -> tuple[Any, str]:
    """Return what scores the output of a model in lower precision, and its name in words.

    A float32 copy of the same weights, which adds no rounding of its own worth mentioning: the distance to
    it is that of the decoder alone. Scored by the model's own plain forward instead, the rounding of both
    would add up, and it would be neither more exact nor nearer to the decoder, whose batch and width are
    others. Only where there is no room for twice the memory the model itself must do. Either is an
    imperfect reference: the paired test does not mind, and the margin is measured against the one in use.
    """
    if next(model.parameters()).dtype == torch.float32:
        return model, "plain float32 forwards"
    needed = 4 * sum(parameter.numel() for parameter in model.parameters())
    if needed > 0.8 * _free_bytes(model.device):
        return model, f"its own plain {str(model.dtype).removeprefix('torch.')} forwards"
    return copy.deepcopy(model).to(torch.float32), "a float32 copy of its weights"


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):  # not every system says
        return float("inf")


@torch.inference_mode()
def led_along(runner: ModelRunner, texts: Sequence[Text], width: int) -> Tensor:
    """Return the logits of ordinary decoding along some texts, all in one batch [texts, T, vocab].

    They predict every token but the first of each output, which comes from the prefill: T is the outputs'
    length less one. The last step is as narrow as what is left. Written into the runner's cache from row 0
    on.
    """
    prompts = [prompt for prompt, _ in texts]
    device = runner.device
    longest = max(map(len, prompts))
    padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    lengths = [len(prompt) for prompt in prompts]
    last = [length - 1 for length in lengths]
    runner.forward(torch.tensor(padded, device=device), [0] * len(texts), lengths, keep=last)
    outputs = torch.tensor([output for _, output in texts], device=device)
    rows = []
    for begin in range(0, outputs.shape[1] - 1, width):
        window = outputs[:, begin : begin + width][:, : outputs.shape[1] - 1 - begin]
        starts = [length + begin for length in lengths]
        rows.append(runner.forward(window, starts, [window.shape[1]] * len(texts)).logits)
    runner.forwards.clear()
    return torch.cat(rows, dim=1)


def law_after_first(oracle: Oracle, text: Text, logits: Tensor) -> Tensor:
    """Return the law of every token of an output but the first, given the logits of those."""
    return oracle.law(logits, *text, start=1).cpu()


@dataclass
class _Distances:
    """TV per token of one comparison."""

    batch: int
    width: int
    against: str
    values: list[FloatArray] = field(default_factory=list)

    def row(self) -> FloorRow:
        found = np.concatenate(self.values)
        return FloorRow(
            self.batch,
            self.width,
            self.against,
            len(found),
            float(found.mean()),
            float(np.quantile(found, HIGH)),
        )


@dataclass(frozen=True, slots=True)
class Floor:
    """What was measured; `rows` as they are shown.

    Rounding moves a law by its TV distance, but this way here and that way there. What a test of a direction
    sees of it is the mean shift of the direction's set A: how much more likely A is than the reference says.
    The largest such mean, over directions, drafts and widths, with `ERRORS` standard errors and times
    `MARGIN_FACTOR`, is `margin`. `paired_margin` is the same of decoding at other widths against ordinary
    decoding. `largest_shift` is the largest mean itself, and the direction it is in.

    `regrets` are those of the most likely token of ordinary decoding, in logits. `likelihood_excess` is the
    largest mean over settings of log E[p_engine / p_reference] per token, what rounding adds to the expected
    likelihood of a text that is drawn twice.
    """

    rows: tuple[FloorRow, ...]
    margin: float
    paired_margin: float
    largest_shift: tuple[float, str]
    regrets: FloatArray
    likelihood_excess: float


class FloorMeter:
    """Measures the floor on texts, some at a time.

    Args:
        runner: of the engine under audit; its cache is overwritten.
        oracle: the reference.
        widths: tokens per row of one forward, 1 for ordinary decoding and those of speculation.
        rows: texts in one batch at most.
        drafts: the laws of drafts, on which the sets of some directions depend.
    """

    def __init__(
        self,
        runner: ModelRunner,
        oracle: Oracle,
        widths: Sequence[int],
        rows: int,
        drafts: Sequence[DraftLaw],
    ) -> None:
        self.runner = runner
        self.oracle = oracle
        self.widths = sorted({1, *widths})
        self.rows = rows
        self.regrets: list[FloatArray] = []
        self._distances: dict[tuple[int, int, str], _Distances] = {}
        self._excess: dict[tuple[int, int], list[float]] = {}
        self._shifts: dict[tuple[int, int, str], list[FloatArray]] = {}
        self._alternatives = Alternatives(has_draft=True)
        self._drafts = drafts
        self._alone = 0

    @property
    def num_regrets(self) -> int:
        """How many regrets were measured so far."""
        return sum(map(len, self.regrets))

    def measure(self, texts: Sequence[Text]) -> None:
        """Read some texts at every width, all in one batch; the first few alone too."""
        length = len(texts[0][1])
        size = max(1, min(self.rows, LOGIT_VALUES // (length * self.runner.vocab)))
        for start in range(0, len(texts), size):
            chunk = texts[start : start + size]
            logits = {width: led_along(self.runner, chunk, width) for width in self.widths}
            for place, raw in self.oracle.along(chunk):
                text = chunk[place]
                laws = {
                    (size, w): law_after_first(self.oracle, text, rows[place]) for w, rows in logits.items()
                }
                alone = size > 1 and self._alone < FEW_TEXTS
                self._alone += alone
                for width in self.widths if alone else ():
                    single = led_along(self.runner, [text], width)[0]
                    laws[1, width] = law_after_first(self.oracle, text, single)
                self._compare(text, raw, laws, size, shifts=place % SHIFTS_EVERY == 0)

    def _compare(
        self, text: Text, raw: Tensor, laws: dict[tuple[int, int], Tensor], batch: int, *, shifts: bool
    ) -> None:
        """Compare the laws along one text, by batch and width, with the reference's and with one another.

        Each is compared with the reference; a width with width 1 of the same batch; one row with the same
        width in a batch.
        """
        prompt, output = text
        p = self.oracle.law(raw, prompt, output).cpu()
        reference = p[1:]
        pairs = []
        for (size, width), law in laws.items():
            self._note(size, width, law, reference)
            pairs.append(((size, width, "reference"), law, reference))
            if size == batch and width > 1:
                pairs.append(((size, width, f"batch {batch}, width 1"), law, laws[batch, 1]))
            elif size != batch:
                pairs.append(((size, width, f"batch {batch}, width {width}"), law, laws[batch, width]))
        for key, law, other in pairs:
            kept = self._distances.setdefault(key, _Distances(*key))
            kept.values.append(((law - other).abs().sum(-1) / 2).numpy())
        if not shifts:
            return
        pairs = [pair for pair in pairs if pair[0][0] == batch]
        differences = [reference + law - other for _, law, other in pairs]
        found = []
        for draft in self._drafts:
            q = draft.laws(prompt, output, raw, p).cpu()[1:]
            found.append(self._alternatives.shifts(reference, q, differences).mean(0))
        for place, (key, _, _) in enumerate(pairs):
            self._shifts.setdefault(key, []).append(np.stack([each[place] for each in found]))

    def _note(self, batch: int, width: int, law: Tensor, reference: Tensor) -> None:
        best = law.argmax(-1, keepdim=True)
        fallen = reference.max(-1).values.log() - reference.gather(-1, best).squeeze(-1).log()
        self.regrets.append((fallen * self.oracle.sampling.temperature).clamp(0, 1e6).numpy())
        ratio = torch.where(reference > 0, law * law / reference.clamp_min(1e-300), 0.0).sum(-1)
        self._excess.setdefault((batch, width), []).append(float(ratio.clamp_min(1e-300).log().mean()))

    def result(self) -> Floor:
        """Return what was found, the margins by `MARGIN_FACTOR`."""
        rows = tuple(self._distances[key].row() for key in sorted(self._distances))
        bounds = {"reference": 0.0, "ordinary": 0.0}
        largest = (0.0, self._alternatives.directions[0].name)
        for (_, _, against), values in self._shifts.items():
            means = np.stack(values)  # [texts, drafts, directions]
            shift = np.abs(means.mean(0))
            error = means.std(0) / np.sqrt(max(1, len(means) - 1))
            kind = "reference" if against == "reference" else "ordinary"
            bounds[kind] = max(bounds[kind], float((shift + ERRORS * error).max()))
            if kind == "reference" and shift.max() > largest[0]:
                column = int(shift.max(0).argmax())
                largest = float(shift.max()), self._alternatives.directions[column].name
        excess = max(float(np.mean(values)) for values in self._excess.values())
        return Floor(
            rows,
            margin=MARGIN_FACTOR * bounds["reference"],
            paired_margin=MARGIN_FACTOR * bounds["ordinary"],
            largest_shift=largest,
            regrets=np.concatenate(self.regrets),
            likelihood_excess=max(0.0, excess),
        )


def spread(runner: ModelRunner, oracle: Oracle, texts: Sequence[Text], width: int) -> Iterator[float]:
    """Yield, per text, the sum over its tokens of the TV distance between width 1 and another width.

    Averaged over draws of ordinary decoding it bounds the distance of the joint laws of whole outputs: one
    token after another is exchanged, and each exchange moves no more than its own distance.
    """
    laws = [led_along(runner, texts, each) for each in (1, width)]
    for place, text in enumerate(texts):
        one, other = (law_after_first(oracle, text, rows[place]) for rows in laws)
        yield float((one - other).abs().sum() / 2)
