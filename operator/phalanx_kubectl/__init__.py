"""`kubectl phalanx`: a plugin of kubectl that shows services and drains or restarts what they run."""
