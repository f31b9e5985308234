"""The engine in a user's process: sampling parameters, outputs, and a group of ranks in a thread."""
