"""Decoding strategies, one file each. A file exports `Options`, `build`, and its drafter."""
