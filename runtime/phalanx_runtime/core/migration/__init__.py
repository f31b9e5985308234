"""Moves at a leader: state machines of source and target, and rescue before preemption."""
