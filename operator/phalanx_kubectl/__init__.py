"""`kubectl phalanx`: a kubectl plugin that shows services, drains groups and restarts services."""
