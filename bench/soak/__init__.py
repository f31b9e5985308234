"""Runs a service for hours under load and random faults, and reports which process grows."""
