"""Fits the self-draft exit of a model: `python -m phalanx_runtime.fitting`, a separate program."""
