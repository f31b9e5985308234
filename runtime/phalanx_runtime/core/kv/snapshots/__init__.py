"""Prefix sharing for models that keep a state per request: snapshots of the state at ends of pages."""
