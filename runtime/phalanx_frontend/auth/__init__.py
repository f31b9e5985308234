"""API keys and callers: the sender of a request, and what its key permits."""
