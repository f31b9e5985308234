"""Moves as decided at a leader: the source machine, the target machine, and rescue before preemption."""
