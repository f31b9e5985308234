"""API types, labels and wire frames that all programs share. No effects."""
