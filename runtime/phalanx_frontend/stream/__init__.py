"""Streaming responses: text from tokens, SSE events, resumption."""
