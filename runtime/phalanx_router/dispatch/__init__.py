"""Dispatching of queued requests to groups, holds during a cold start, and tenant quotas."""
