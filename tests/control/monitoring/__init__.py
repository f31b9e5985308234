"""Dashboards, rules and alerts."""
