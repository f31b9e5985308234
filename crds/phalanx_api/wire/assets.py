"""What a door needs of a model, told once by each leader and kept by the hash of its content."""

import hashlib

import msgspec

_encode = msgspec.msgpack.Encoder().encode


class Assets(msgspec.Struct, frozen=True, array_like=True, tag="assets"):
    """What a door needs of a model: files by name (tokenizer, chat template, generation config) and limits.

    `content_hash` is `make_assets` of the rest, so a door may keep it for ever.
    """

    content_hash: str
    files: dict[str, bytes]
    served_names: list[str]
    max_model_len: int
    eos_token_ids: list[int]
    vocab_size: int | None = None
    """Rows of the embedding: a tokenizer may know ids that the model does not. None: not told."""


def make_assets(
    files: dict[str, bytes],
    served_names: list[str],
    max_model_len: int,
    eos_token_ids: list[int],
    vocab_size: int | None = None,
) -> Assets:
    """Assets with their content hash: SHA-256 over files sorted by name, names and limits."""
    hasher = hashlib.sha256()
    for name in sorted(files):
        hasher.update(_encode([name, files[name]]))
    hasher.update(_encode([served_names, max_model_len, eos_token_ids, vocab_size]))
    return Assets(hasher.hexdigest(), files, served_names, max_model_len, eos_token_ids, vocab_size)
