"""Chooses the group of a request: pure functions over frozen records."""
