"""Moves as the router that owns the stream decides them: pure machines, no clock and no effects."""
