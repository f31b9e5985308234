"""The engine loop of rank 0, and its client in the HTTP process."""
