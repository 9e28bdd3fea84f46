"""Every figure of METRICS.md, derived from records; nothing else in specbench computes a metric."""

from specbench.metrics.derive import summarise

__all__ = ["summarise"]
