"""Kinds of `quantization_config`, read into the schemes of weights."""
