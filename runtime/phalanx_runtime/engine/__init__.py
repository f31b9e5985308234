"""The engine loop of rank 0, and its face in the HTTP process."""
