"""The runtime: one tensor-parallel group that serves a model."""
