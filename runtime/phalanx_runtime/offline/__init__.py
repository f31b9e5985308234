"""The engine in a user's own process: sampling parameters, outputs, and a group of ranks in a thread."""
