"""What the C library does with memory that is freed, for work that allocates the same again and again."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, as <malloc.h> numbers them
KEPT = 1 << 30
"""Bytes of freed memory that the process may hold on to."""
LARGEST_KEPT = 1 << 25
"""Larger blocks always go back: 32 MB is the most that mallopt takes."""


@cache
def keep_freed_memory() -> bool:
    """Let the process keep freed memory for its next tensors; return whether this C library can.

    By default glibc gives large blocks back at once, and every tensor of a few MB then begins with a page
    fault for each of its pages. On a small model that is a seventh of a step, and it comes and goes with what
    was allocated before. It is a setting of the whole process, so commands choose it, not functions that
    others call from theirs.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEPT)) and bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT))
