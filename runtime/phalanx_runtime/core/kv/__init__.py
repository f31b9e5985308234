"""The page pool: allocation, prefix cache, sharing, eviction, and its integrity check."""
