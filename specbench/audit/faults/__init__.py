"""Decoders broken on purpose, one rule each, as seen in real code: how we know that the audit works.

A fault is a module with `alter(strategy)`, which returns the strategy with one rule broken. Its file's
stem is its name, underscores as hyphens.
"""
