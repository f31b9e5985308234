"""Execution of balancing: the balance loop, and the mover that executes moves over the links."""
