"""Pure balancing decisions: hotspots, moves of running requests, shedding."""
