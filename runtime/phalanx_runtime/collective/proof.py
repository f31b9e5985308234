"""Mutual proof that ranks hold the group's token: HMAC-SHA256 over both nonces. The token is never sent."""

import hashlib
import hmac
import secrets

NONCE_BYTES = 16
PROOF_BYTES = 32


def make_nonce() -> bytes:
    """Fresh random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(token: bytes, role: str, incarnation: int, ranks: tuple[int, int], nonces: bytes) -> bytes:
    """HMAC under the token for this role, incarnation, pair of ranks and pair of nonces."""
    said = f"phalanx {role} {incarnation} {ranks[0]} {ranks[1]} ".encode() + nonces
    return hmac.new(token, said, hashlib.sha256).digest()


def is_equal_proof(given: bytes, expected: bytes) -> bool:
    """Whether two proofs are equal, in constant time."""
    return hmac.compare_digest(given, expected)
