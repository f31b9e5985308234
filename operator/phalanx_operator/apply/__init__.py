"""Effects of a plan on the API server."""
