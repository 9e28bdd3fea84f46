"""Test of the allocator's setting, in a process of its own: it cannot be taken back."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from specbench.runtime.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(1_000_000, dtype=torch.float64)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

default = faults()
kept = keep_freed_memory() and keep_freed_memory()
faults()
print(int(kept), default, faults())
"""


def test_memory_that_is_kept_is_not_faulted_in_again() -> None:
    shown = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    kept, default, after = map(int, shown.split())
    if not kept:
        pytest.skip("this C library has no such setting")
    assert after < default / 10
