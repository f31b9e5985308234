"""Engine loop of rank 0, and its client."""
