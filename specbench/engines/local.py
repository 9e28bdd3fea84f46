"""The in-process engine: an HF causal LM on this machine, every phase timed, every distribution known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench import registry
from specbench.engines.base import Capabilities, Opened
from specbench.errors import UsageError
from specbench.records import MemoryRecord, Schedule

if TYPE_CHECKING:
    from specbench.runtime.events import Event
    from specbench.runtime.grammar import GrammarCompiler, Matcher
    from specbench.runtime.loop import StepLoop
    from specbench.runtime.protocols import Strategy


@dataclass(frozen=True, slots=True)
class Options:
    """`rows`: the most requests decoded together; `width`: slots per row, 0 for what a schedule needs."""

    rows: int = 32
    width: int = 0


class LocalEngine:
    """Decodes with models already loaded.

    Args:
        target: the HF causal LM under test.
        eos_ids: its end-of-sequence ids.
        draft: a second HF causal LM, or None.
        draft_ids: the target's id of each of the draft's, -1 where it has none; None if they are the same.
        tokenizer: the target's; needed by requests with stop strings or grammars.
        rows: the most requests decoded together.
        width: slots per row: the longest prompt with its output, and the longest draft.
    """

    capabilities = Capabilities(reports_rounds=True, reports_phase_times=True, can_audit=True)

    def __init__(
        self,
        target: Any,
        *,
        eos_ids: tuple[int, ...],
        draft: Any | None = None,
        draft_ids: Sequence[int] | None = None,
        tokenizer: Any | None = None,
        rows: int = 32,
        width: int = 2048,
    ) -> None:
        from specbench.models.quiet import quiet
        from specbench.runtime.cache import SlotCache
        from specbench.runtime.probe import probe
        from specbench.runtime.runner import ModelRunner

        with quiet():  # transformers comments on attentions that a model does not have
            self.probes = {"target": probe(target)}
            if draft is not None:
                self.probes["draft"] = probe(draft)
        self.rows = rows
        self.width = width
        self.eos_ids = eos_ids
        self.draft = draft
        self.draft_ids = draft_ids
        self.tokenizer = tokenizer
        self._grammars: GrammarCompiler | None = None
        self.runner = ModelRunner(target, SlotCache(rows, width))
        self.strategy: Strategy | None = None
        self._loop: StepLoop | None = None
        self._opened: dict[str, Strategy] = {}

    def open(self, strategy: str, *, alter: Callable[[Strategy], Strategy] | None = None) -> Opened:
        """Build a strategy (kept for the next time), or raise UsageError naming what is wrong."""
        if strategy not in self._opened:
            self._opened[strategy] = self._build(strategy)
        opened = self._opened[strategy]
        if alter is not None:
            opened = alter(opened)
        self.strategy = opened
        return Opened(opened.name, opened.lossless, opened.max_draft)

    def _build(self, text: str) -> Strategy:
        from specbench.runtime.protocols import Resources

        spec = registry.parse(text)
        options = registry.options("strategy", spec)
        resources = Resources(
            target=self.runner,
            draft_model=self.draft,
            draft_weights=weight_bytes(self.draft) if self.draft is not None else 0,
            draft_ids=self.draft_ids,
            rows=self.rows,
            width=self.width,
        )
        built: Strategy = registry.module("strategy", spec.name).build(options, text, resources)
        return built

    def serve(self, schedule: Schedule) -> Iterator[Event]:
        """Serve a schedule; step records come last, since their times are read after the run."""
        from specbench.runtime.loop import StepLoop

        if self.strategy is None:
            raise UsageError("no strategy is open", hint="call open() before serve()")
        # Read before the clock starts, so that no strategy pays for being the first to need them.
        for grammar in dict.fromkeys(r.sampling.grammar for r in schedule.requests):
            if grammar is not None:
                self._grammars = self._grammars or self._grammar_compiler()
                if self._grammars is not None:
                    self._grammars.matcher(grammar)
        loop = self.strategy.loop or StepLoop
        self._loop = loop(
            self.runner,
            self.strategy,
            rows=self.rows,
            eos_ids=self.eos_ids,
            decode=self.text if self.tokenizer is not None else None,
            grammars=self._grammars,
        )
        return self._loop.serve(schedule)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with nothing left out or tidied up."""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(tokens), **options))  # type: ignore[union-attr]

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the beginning of a grammar; raises UsageError without a tokenizer."""
        self._grammars = self._grammars or self._grammar_compiler()
        if self._grammars is None:
            raise UsageError("grammars need a tokenizer, and this engine was given none")
        return self._grammars.matcher(grammar)

    def _grammar_compiler(self) -> GrammarCompiler | None:
        from specbench.runtime.grammar import GrammarCompiler

        if self.tokenizer is None:
            return None
        return GrammarCompiler(self.tokenizer, vocab_size=self.runner.vocab, eos_ids=self.eos_ids)

    def cancel(self, request: int) -> None:
        """Stop a request at its next step."""
        if self._loop is not None:
            self._loop.cancelled.add(request)

    def memory(self) -> MemoryRecord:
        """Return weights, KV per token and lookahead of the open strategy, and the process's peak."""
        assert self.strategy is not None
        drafter = self.strategy.drafter
        held = drafter.memory() if drafter is not None else None
        peak, source = _peak_memory(self.runner.device.type)
        return MemoryRecord(
            target_weights=weight_bytes(self.runner.model),
            draft_weights=held.weights if held else 0,
            target_kv_per_token=self.runner.cache.bytes_per_token,
            draft_kv_per_token=held.kv_per_token if held else 0,
            lookahead_tokens=self.strategy.lookahead,
            peak_bytes=peak,
            peak_source=source,
        )

    def close(self) -> None:
        """Drop caches and strategies; the models belong to the caller."""
        self._opened.clear()
        self.strategy = None
        self.runner.cache.keys.clear()
        self.runner.cache.values.clear()


def weight_bytes(model: Any) -> int:
    """Return the bytes of a model's parameters, shared ones once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _peak_memory(device: str) -> tuple[int | None, str | None]:
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated()), "allocator peak"
    try:
        import resource
    except ImportError:  # not on Windows
        return None, None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024), "peak RSS of the process"
