"""Benchmark and audit speculative decoding of language models."""

__version__ = "0.1.0"
