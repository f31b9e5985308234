"""Execution of balancing: the periodic balance loop, and the mover that executes moves over the links."""
