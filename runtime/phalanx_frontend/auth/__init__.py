"""API keys, and the callers that they authenticate."""
