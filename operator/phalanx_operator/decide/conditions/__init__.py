"""Conditions and status fields of a service."""
