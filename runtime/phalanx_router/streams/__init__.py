"""Client streams: journal, token stream, traffic statistics."""
