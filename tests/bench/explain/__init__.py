"""Explanations of loads with one known limit, compared with the simulator."""
