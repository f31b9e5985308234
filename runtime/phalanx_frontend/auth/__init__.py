"""API keys and callers: who sends a request, and what the key permits."""
