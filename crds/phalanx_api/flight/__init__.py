"""The flight recorder: the latest decisions and steps of each router and rank, in a ring of fixed size."""
