"""Fits the exit by which the first layers of a model draft for it: `python -m phalanx_runtime.fitting`, a program of its own."""
