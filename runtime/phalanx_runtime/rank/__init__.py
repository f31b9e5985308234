"""One process per device: runs step plans with torch."""
