"""Traces of requests: spans, which of them are exported, and their export by OTLP."""
