"""The key of a page: what names its content, the same at a group and at a router.

    key[-1] = root = H(model, adapter, tenant, cache_salt)        key[i] = H(key[i - 1] + tokens of page i)

H is BLAKE2b with 128 bits. A key names the page and all before it, so equal keys mean equal prefixes under equal salt: no
request sees whether a prefix of another tenant, adapter or salt is cached. Only full pages have keys. Token ids below 2^32.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16


def root_key(model: str, adapter: str = "", tenant: str = "", cache_salt: str = "") -> bytes:
    """The key before the first page. Fields are told apart by their lengths, so no two lists of fields meet."""
    digest = blake2b(digest_size=KEY_BYTES, person=b"phalanx root")
    for field in (model, adapter, tenant, cache_salt):
        text = field.encode()
        digest.update(struct.pack("<Q", len(text)) + text)
    return digest.digest()


class PrefixKeys:
    """Keys of one request's full pages, each hashed once, in the order of the pages."""

    __slots__ = ("_pack", "keys", "page_size", "root")

    def __init__(self, root: bytes, page_size: int) -> None:
        self.root = root
        self.page_size = page_size
        self.keys: list[bytes] = []
        self._pack = struct.Struct(f"<{page_size}I")

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """All keys, those of pages that became full included. `tokens` are all of the request; the first ones never change."""
        keys, size = self.keys, self.page_size
        parent = keys[-1] if keys else self.root
        for start in range(len(keys) * size, len(tokens) - size + 1, size):
            parent = blake2b(parent + self._pack.pack(*tokens[start : start + size]), digest_size=KEY_BYTES).digest()
            keys.append(parent)
        return keys
