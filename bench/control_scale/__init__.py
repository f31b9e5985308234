"""Many services on nodes that are not there: `python -m bench.control_scale` measures the operator against their number."""
