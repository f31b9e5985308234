"""The Batch API."""
