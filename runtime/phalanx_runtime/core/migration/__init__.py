"""Moves at a leader: the state machines of source and target, and rescue before preemption."""
