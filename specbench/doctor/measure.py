"""The two rates that bound decoding, measured: bytes read from memory and operations of a matrix product.

Also what they do not tell: whether a product with a few tokens takes as long as one with a single token,
as reading the weights once would have it. Libraries often switch to a slower kernel there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

_BUFFER_BYTES = 256 << 20
_LARGEST_BUFFER_BYTES = 2 << 30
_COLUMNS = 4096
_SMALLEST_SIDE = 256
_FEWEST_REPEATS = 3
TOKENS = 4
"""Tokens of the product that is compared with one token: a round of k = 3."""

SLOW_FEW_TOKENS = 1.5
"""Times the product with one token from which verification does not count as free."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured; tests ask for less.

    `buffer_bytes` None takes 256 MiB (1 GiB on an accelerator), or four times the last cache if that is more.
    A square product's side doubles until one takes `long_enough` seconds. Each quantity is repeated for
    `seconds`.
    """

    buffer_bytes: int | None = None
    largest_side: int = 8192
    long_enough: float = 0.02
    seconds: float = 0.4


@dataclass(frozen=True, slots=True)
class Rate:
    """An amount per second over repeats."""

    median: float
    lowest: float
    highest: float
    repeats: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates of one device.

    `read` is in bytes per second; `matmul` in operations per second, by dtype, of a square product of
    `matmul_side`. `few_tokens` is the time of a product of a weight matrix with four tokens / with one.
    """

    device: str
    buffer_bytes: int
    cache_bytes: int | None
    read: Rate
    matmul: dict[str, Rate]
    matmul_side: dict[str, int]
    few_tokens: dict[str, float]
    seconds: float


def measure(device: str, dtypes: Iterable[str], effort: Effort, tick: Callable[[], None]) -> Measured:
    """Measure a device with all of torch's threads; `tick` is called between measurements."""
    import torch

    started = time.monotonic()
    place = torch.device(device)
    cache = _last_cache_bytes() if place.type == "cpu" else None
    size = effort.buffer_bytes or _buffer_bytes(place, cache)
    size = max(size // (4 * _COLUMNS), 1) * 4 * _COLUMNS
    # Ones, not zeros: a page that nobody has written to may be the same zero page over and over.
    buffer = torch.ones(size // 4, dtype=torch.float32, device=place)
    matmul: dict[str, Rate] = {}
    sides: dict[str, int] = {}
    few: dict[str, float] = {}
    with torch.inference_mode():
        read = _rate(buffer.sum, size, place, effort.seconds)
        tick()
        for name in dtypes:
            dtype: torch.dtype = getattr(torch, name)
            try:
                sides[name], matmul[name] = _matmul(dtype, place, effort)
                few[name] = _few_tokens(buffer, dtype, place, effort)
            except RuntimeError:  # this device has no such product: absent, not zero
                continue
            tick()
    return Measured(device, size, cache, read, matmul, sides, few, time.monotonic() - started)


def _matmul(dtype: torch.dtype, place: torch.device, effort: Effort) -> tuple[int, Rate]:
    """Return the side of a square product that takes long enough, and its rate."""
    import torch

    def product(side: int) -> Callable[[], object]:
        matrix = torch.randn(side, side, generator=torch.Generator().manual_seed(0)).to(place, dtype)
        return lambda: matrix.mm(matrix)

    side = min(_SMALLEST_SIDE, effort.largest_side)
    # The shortest of three: on a busy machine a small product may be kept waiting for many times its length.
    while side * 2 <= effort.largest_side and _shortest(product(side), place) < effort.long_enough:
        side *= 2
    return side, _rate(product(side), 2 * side**3, place, effort.seconds)


def _few_tokens(buffer: torch.Tensor, dtype: torch.dtype, place: torch.device, effort: Effort) -> float:
    """Return the time of a product of the whole buffer as weights with four tokens / with one."""
    import torch

    weights = buffer.view(dtype).view(-1, _COLUMNS)
    rates = []
    for tokens in (1, TOKENS):
        states = torch.ones(tokens, _COLUMNS, dtype=dtype, device=place)
        product = lambda s=states: torch.nn.functional.linear(s, weights)  # noqa: E731
        rates.append(_rate(product, 1, place, effort.seconds / 2).median)
    return rates[0] / rates[1]


def _rate(work: Callable[[], object], amount: float, place: torch.device, seconds: float) -> Rate:
    """Repeat `work` for so many seconds after one warm-up."""
    _seconds(work, place)
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates) < _FEWEST_REPEATS:
        rates.append(amount / max(_seconds(work, place), 1e-9))
    return Rate(statistics.median(rates), min(rates), max(rates), len(rates))


def _shortest(work: Callable[[], object], place: torch.device) -> float:
    return min(_seconds(work, place) for _ in range(3))


def _seconds(work: Callable[[], object], place: torch.device) -> float:
    import torch

    wait: Callable[[], object] = lambda: None  # noqa: E731
    if place.type == "cuda":
        wait = lambda: torch.cuda.synchronize(place)  # noqa: E731
    elif place.type == "mps":
        wait = torch.mps.synchronize
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def _buffer_bytes(place: torch.device, cache: int | None) -> int:
    """Return a size far beyond the cache, but no more than a quarter of what is free."""
    import torch

    if place.type == "cuda":
        return min(4 * _BUFFER_BYTES, torch.cuda.mem_get_info(place)[0] // 4)
    wanted = max(_BUFFER_BYTES, 4 * (cache or 0))
    return min(wanted, _LARGEST_BUFFER_BYTES, psutil.virtual_memory().available // 4)


def _last_cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """Add up the caches of the highest level, each once; None where the system does not tell."""
    found: dict[tuple[int, str], int] = {}
    for index in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level = int((index / "level").read_text())
            shared = (index / "shared_cpu_list").read_text().strip()
            size = (index / "size").read_text().strip()
            found[level, shared] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or None
