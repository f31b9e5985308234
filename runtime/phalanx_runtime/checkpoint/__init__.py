"""Locates, downloads and converts model folders. No torch."""
