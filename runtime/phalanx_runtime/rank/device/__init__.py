"""The device path of a rank: rows, captured decode steps, and sampling without a wait of the host."""
