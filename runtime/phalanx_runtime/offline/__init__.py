"""The engine in a user's process."""
