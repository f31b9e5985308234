"""Who gets a request: ours as it runs in production, and what others do, a page each."""
