"""How files on disk become one short identity without reading gigabytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_WHOLE = 1 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 12


def fingerprint_files(paths: Iterable[Path]) -> str:
    """Return a SHA-256 over the files' names, sizes and contents; large files are sampled.

    A file of up to 1 MiB is read whole. Of a larger one, the first MiB (where safetensors and GGUF keep
    their headers) and 64 evenly spaced blocks of 4 KiB are read, the last one at its end. Two trainings of
    one architecture have equal headers and sizes, but not equal samples. This tells models apart and
    notices a truncated file; it is no protection against somebody who wants a collision.
    """
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_WHOLE))
            if size > _WHOLE:
                for sample in range(1, _SAMPLES + 1):
                    file.seek((size - _SAMPLE_BYTES) * sample // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
