"""Findings about summaries of routers."""
