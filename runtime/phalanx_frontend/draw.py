"""Random names and seeds, from the system's own source: two routers never draw the same."""

import secrets


def draw_id(prefix: str) -> str:
    """A request id with 128 random bits."""
    return prefix + secrets.token_hex(16)


def draw_seed() -> int:
    """A seed of 63 random bits, for a request that brings none."""
    return secrets.randbits(63)
