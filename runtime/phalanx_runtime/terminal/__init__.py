"""Commands for people at a terminal: `run` and `chat`. Their models are at a URL or on this machine."""
