"""Pure balancing decisions: hotspots, moves of running requests, shedding. Time is an argument; the router applies the
effects."""
