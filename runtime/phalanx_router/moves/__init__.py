"""Moves of streams between groups, as pure state machines."""
