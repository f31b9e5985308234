"""What should be done, from what was seen: pure functions over frozen records."""
