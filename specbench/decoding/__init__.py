"""Speculative decoding as pure functions of tensors: no models, no input or output, no clock."""
