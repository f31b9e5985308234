"""Which group gets a request: pure functions over frozen records."""
