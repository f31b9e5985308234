"""`kubectl phalanx` shows services, drains groups and restarts services."""
