"""Mutual authentication of ranks: HMAC-SHA256 over both nonces by the group's token."""

import hashlib
import hmac
import secrets

NONCE_BYTES = 16
PROOF_BYTES = 32


def make_nonce() -> bytes:
    """Returns random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(token: bytes, role: str, incarnation: int, ranks: tuple[int, int], nonces: bytes) -> bytes:
    """Returns the HMAC."""
    message = f"phalanx {role} {incarnation} {ranks[0]} {ranks[1]} ".encode() + nonces
    return hmac.new(token, message, hashlib.sha256).digest()


def is_equal_proof(received: bytes, expected: bytes) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(received, expected)
