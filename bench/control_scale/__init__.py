"""Measures the operator by number of services, on simulated nodes."""
