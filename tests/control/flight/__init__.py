"""Recordings of the flight recorder."""
