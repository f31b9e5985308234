"""Routing policies: ours as in production, and those of other projects."""
