"""Moves of streams between groups as pure state machines of the router that owns the stream."""
