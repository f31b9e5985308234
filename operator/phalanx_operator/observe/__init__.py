"""Observation of a service: API objects to a frozen snapshot."""
