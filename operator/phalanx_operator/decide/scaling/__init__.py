"""Autoscaling: how many groups a service should have."""
