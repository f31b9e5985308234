"""Tiers of KV pages below the page pool."""
