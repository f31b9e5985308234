"""Dispatch of queued streams to groups."""
