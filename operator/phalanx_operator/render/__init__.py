"""Kubernetes objects as dicts, from a spec: pure functions."""
