"""Phase times: a monotonic clock on CPU, events on CUDA that are read after the run.

Reading a CUDA event before the run is over would stall the device; so marks are handles, and seconds
come out only in `resolve`.
"""

from __future__ import annotations

import time
from typing import Any

import torch

Mark = Any
"""A point in time: a float on CPU, an event on CUDA."""


class Stopwatch:
    """Marks points in time on one device."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"

    def mark(self) -> Mark:
        """Mark this point in the device's work."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks; on CUDA only after the run, and after `finish`."""
        if not self.on_cuda:
            return float(end - start)
        return float(start.elapsed_time(end)) / 1000

    def finish(self) -> None:
        """Wait until every mark can be read."""
        if self.on_cuda:
            torch.cuda.synchronize()
