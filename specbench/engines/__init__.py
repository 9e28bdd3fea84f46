"""Engines, one file each, behind one protocol (`base.py`)."""
