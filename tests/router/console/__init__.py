"""The console of a router."""
