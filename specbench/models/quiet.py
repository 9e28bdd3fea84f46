"""How the libraries that read models are kept silent, and how their errors become one line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from specbench.errors import ModelError, SpecbenchError


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and progress bars of transformers and huggingface_hub, and restore them afterwards."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    transformers_bars = logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        disable_progress_bars()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if transformers_bars:
                logging.enable_progress_bar()
            if hub_bars:
                enable_progress_bars()


@contextmanager
def as_model_error(what: str, hint: str | None = None) -> Iterator[None]:
    """Turn any failure inside the block into a one-line `ModelError` that begins with `what`."""
    try:
        yield
    except SpecbenchError:
        raise
    except Exception as error:  # tokenizers raises plain Exception, so nothing narrower will do
        raise ModelError(f"{what}: {one_line(error)}", hint=hint) from error


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
