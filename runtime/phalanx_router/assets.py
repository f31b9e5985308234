"""What the router knows of the model: assets by content hash, and which of them the door uses now.

The door uses those of the newest ready group; when none is ready, those it used last. A group is given only requests
whose token ids it reads the same way, so groups are compared by their tokenizer, not by all their assets.
"""

import hashlib
from collections.abc import Collection

import msgspec

from phalanx_api import wire


class AssetShelf:
    """Assets that leaders sent. `current` are those that the door uses."""

    def __init__(self, served_names: Collection[str] = ()) -> None:
        self._served_names = list(served_names)
        self._known: dict[str, wire.Assets] = {}
        self._tokenizers: dict[str, str] = {}
        self._current: str | None = None

    def has(self, assets_hash: str) -> bool:
        """Whether these assets came already."""
        return assets_hash in self._known

    def add(self, assets: wire.Assets) -> bool:
        """Whether the assets are what their hash says, and were kept."""
        made = wire.make_assets(assets.files, assets.served_names, assets.max_model_len, assets.eos_token_ids, assets.vocab_size)
        if made.content_hash != assets.content_hash:
            return False
        if self._served_names:
            assets = msgspec.structs.replace(assets, served_names=self._served_names)
        self._known[made.content_hash] = assets
        self._tokenizers[made.content_hash] = hashlib.sha256(assets.files.get("tokenizer.json", b"")).hexdigest()
        return True

    def use(self, assets_hash: str) -> None:
        """Makes these known assets the current ones."""
        self._current = assets_hash

    def keep(self, in_use: Collection[str]) -> None:
        """Forgets assets of groups that are gone, except the current ones."""
        for assets_hash in set(self._known) - set(in_use) - {self._current}:
            del self._known[assets_hash], self._tokenizers[assets_hash]

    def current(self) -> wire.Assets | None:
        """The assets that the door uses, or None before any came."""
        return None if self._current is None else self._known[self._current]

    def current_tokenizer(self) -> str | None:
        """The tokenizer of the current assets, as a hash."""
        return None if self._current is None else self._tokenizers[self._current]

    def tokenizer(self, assets_hash: str) -> str | None:
        """The tokenizer of these assets, as a hash, or None while they are not known."""
        return self._tokenizers.get(assets_hash)
