"""Resuming streams by `Last-Event-ID`, also at another router."""
