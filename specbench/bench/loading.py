"""What runs and audits share: models, an engine for them, and how words become tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specbench import registry
from specbench.bench.config import RunConfig
from specbench.bench.sampling import Encode
from specbench.errors import UsageError

if TYPE_CHECKING:
    from specbench.engines.local import LocalEngine
    from specbench.models import LoadedModel


class Progress(Protocol):
    """What a run tells while it is under way."""

    def stage(self, text: str, total: int | None = None) -> None:
        """Begin a stage of `total` units of work."""
        ...

    def advance(self, amount: int = 1, text: str | None = None) -> None:
        """Some of it is done."""
        ...

    def say(self, text: str) -> None:
        """Tell something worth a line."""
        ...


@dataclass(slots=True)
class Models:
    """The models of a run; both None in a simulation.

    `draft_ids` gives the target's id of each of the draft's, where they are not the same.
    """

    target: LoadedModel | None = None
    draft: LoadedModel | None = None
    draft_ids: tuple[int, ...] | None = None

    @property
    def loaded(self) -> list[LoadedModel]:
        """Return those there are."""
        return [model for model in (self.target, self.draft) if model is not None]


def check_writable(results: Path, option: str = "--output") -> None:
    """Find out now, not after the measurement, whether files can be written to the folder of an option."""
    try:
        results.mkdir(parents=True, exist_ok=True)
        probe = results / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise UsageError(
            f"cannot write to {results}: {problem.strerror or problem}", hint=f"choose another {option}"
        ) from None


def load_models(config: RunConfig, dtype: str, progress: Progress) -> Models:
    if registry.parse(config.engine).name == "simulated":
        return Models()
    from specbench import models
    from specbench.runtime.allocator import keep_freed_memory

    keep_freed_memory()
    progress.stage(f"loading {config.target}")
    target = models.load(models.resolve(config.target), dtype=dtype, device=config.device)
    if config.draft is None:
        return Models(target)
    progress.stage(f"loading {config.draft}")
    device = config.draft_device or config.device
    draft = models.load(models.resolve(config.draft), dtype=dtype, device=device)
    ids = models.fit_vocabulary(
        target.tokenizer, draft.tokenizer, target_vocab=target.vocab_size, draft_vocab=draft.vocab_size
    )
    if ids is not None:
        shared = sum(index >= 0 for index in ids)
        progress.say(
            f"the draft's ids are not the target's: {shared} of its {len(ids)} tokens are mapped by their "
            "strings, the others are never drafted"
        )
    return Models(target, draft, ids)


def local_engine(models: Models, *, rows: int, width: int) -> LocalEngine:
    from specbench.engines.local import LocalEngine

    assert models.target is not None
    return LocalEngine(
        models.target.model,
        eos_ids=models.target.eos_token_ids,
        tokenizer=models.target.tokenizer,
        draft=models.draft.model if models.draft is not None else None,
        draft_ids=models.draft_ids,
        rows=rows,
        width=width,
    )


def encoder(target: LoadedModel | None) -> Encode:
    """Return how a word becomes token ids, without special tokens."""
    if target is None:
        return lambda text: list(text.encode())
    return lambda text: list(target.tokenizer(text, add_special_tokens=False)["input_ids"])


def alteration(inject: str | None) -> Callable[[Any], Any] | None:
    """Return the planted fault; it spares strategies that do not draft."""
    if inject is None:
        return None
    alter = registry.module("fault", inject).alter
    return lambda strategy: alter(strategy) if strategy.drafter is not None else strategy
