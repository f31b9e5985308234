"""Dispatching queued requests to groups: the dispatcher, holds during a cold start, and tenant quotas."""
