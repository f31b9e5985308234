"""How ranks prove to one another that they hold the group's token: HMAC-SHA256 over both nonces. The token never travels."""

import hashlib
import hmac
import secrets

NONCE_BYTES = 16
PROOF_BYTES = 32


def make_nonce() -> bytes:
    """Fresh random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(token: bytes, role: str, incarnation: int, ranks: tuple[int, int], nonces: bytes) -> bytes:
    """What only a holder of the token can say, for this role, incarnation, pair of ranks and pair of nonces."""
    said = f"phalanx {role} {incarnation} {ranks[0]} {ranks[1]} ".encode() + nonces
    return hmac.new(token, said, hashlib.sha256).digest()


def agrees(given: bytes, expected: bytes) -> bool:
    """Whether two proofs are equal, in constant time."""
    return hmac.compare_digest(given, expected)
