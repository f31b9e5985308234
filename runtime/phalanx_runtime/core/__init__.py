"""Scheduling decisions: requests, pages, admission, step plans. No torch, no clock, no threads."""
