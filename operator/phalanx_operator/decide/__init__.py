"""Decisions: pure functions from observed records to actions and status."""
