"""Page keys, equal at groups and routers for equal content.

    key[-1] = root = H(model, adapter, tenant, cache_salt)        key[i] = H(key[i - 1] + tokens of page i + its marks)

A mark is the digest of an image at the position of its first token: its placeholder tokens are those of any image of its size.

H is BLAKE2b with 128 bits. Keys differ between tenants and salts, so a request cannot detect cached prefixes of others. Only full
pages have keys. Token ids are below 2^32.
"""

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b

KEY_BYTES = 16


def root_key(model: str, adapter: str = "", tenant: str = "", cache_salt: str = "") -> bytes:
    """Returns the key before the first page. Fields are hashed with their lengths, so they cannot run together."""
    digest = blake2b(digest_size=KEY_BYTES, person=b"phalanx root")
    for field in (model, adapter, tenant, cache_salt):
        text = field.encode()
        digest.update(struct.pack("<Q", len(text)) + text)
    return digest.digest()


class PrefixKeys:
    """Keys of one request's full pages, in page order; each is hashed once."""

    __slots__ = ("_marks", "_pack", "keys", "page_size", "root")

    def __init__(self, root: bytes, page_size: int, marks: Sequence[tuple[int, bytes]] = ()) -> None:
        """`marks`: see `wire.Request.page_marks`."""
        self.root = root
        self.page_size = page_size
        self.keys: list[bytes] = []
        self._pack = struct.Struct(f"<{page_size}I")
        self._marks = _marks_of_pages(marks, page_size)

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Adds keys of pages that became full; returns all. `tokens`: the whole request."""
        keys, size = self.keys, self.page_size
        parent = keys[-1] if keys else self.root
        for start in range(len(keys) * size, len(tokens) - size + 1, size):
            page = self._pack.pack(*tokens[start : start + size]) + self._marks.get(start // size, b"")
            parent = blake2b(parent + page, digest_size=KEY_BYTES).digest()
            keys.append(parent)
        return keys


def _marks_of_pages(marks: Sequence[tuple[int, bytes]], page_size: int) -> dict[int, bytes]:
    """Returns what the marks add to the content of each page."""
    added: dict[int, bytes] = {}
    for position, digest in marks:
        page, offset = divmod(position, page_size)
        added[page] = added.get(page, b"") + struct.pack("<II", offset, len(digest)) + digest
    return added


def longest_hit(is_present: Callable[[int], bool], count: int, hit_pages: int) -> int:
    """Returns the most leading pages, of `count`, after which a request could start that reads the last `hit_pages` of them.

    Looks from the last page on, so that a whole hit takes `hit_pages` look-ups.
    """
    end, run = count, 0
    for page in reversed(range(count)):
        run += 1
        if not is_present(page):
            end, run = page, 0
        elif run == hit_pages:
            break
    return end
