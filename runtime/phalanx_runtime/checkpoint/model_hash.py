"""Names what a group computes with, so that streams go on, and pages are shared, only between groups that compute the same.

    SHA-256 of: dtype, quantisation · config.json without what computes nothing · tokenizer.json · of each weight file in order of
    names: its name, size and header (names, dtypes and shapes of tensors), and its content

Of the content every k-th word of 8 bytes is taken, k the least odd number for which all files give at most `SAMPLE_BYTES`: all of
it up to 64 MiB, else words spread evenly over every tensor. So a training step of any tensor gives another name; one that
changes single rows of a model of tens of gigabytes may not. A copy of the same files has the same name on every node; the same
tensors in other files have another. Parallelism, page size and the precision of the KV cache are no part of it.
"""

import hashlib
import json
import mmap
from pathlib import Path

from phalanx_runtime.checkpoint.folder import read_json, weight_files
from phalanx_runtime.errors import ModelError

SAMPLE_BYTES = 64 << 20
"""Most bytes of weights that are hashed: a quarter of a second."""
_WORD_BYTES = 8
_PIECE_BYTES = 256 << 20
"""Sampled at once. The interpreter is held meanwhile, and a slow disk makes that long."""
_IDLE_KEYS = ("_name_or_path", "_model_name_or_path", "transformers_version")
"""What libraries write into config.json that computes nothing."""


def model_hash(folder: Path, dtype: str, quantization: str | None) -> str:
    """The name, in hex. Blocks while it reads. Raises ModelError when a file is missing or broken."""
    hasher = hashlib.sha256(f"phalanx model 1 {dtype} {quantization or 'none'}".encode())
    config = {key: value for key, value in read_json(folder / "config.json").items() if key not in _IDLE_KEYS}
    hasher.update(json.dumps(config, sort_keys=True).encode())
    try:
        hasher.update(hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest())
        files = weight_files(folder)
        sizes = [path.stat().st_size for path in files]
        step = -(-sum(sizes) // SAMPLE_BYTES) | 1
        for path, size in zip(files, sizes, strict=True):
            hasher.update(f"{path.name} {size} ".encode())
            if size:
                _add_words(hasher, path, size, step)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or folder}: {error.strerror or error}") from error
    return hasher.hexdigest()


def weights_hash(folder: Path) -> str:
    """The name of a model whatever it is computed in, in hex: for what is fitted to its weights. Raises ModelError."""
    return model_hash(folder, "any", None)


def _add_words(hasher: "hashlib._Hash", path: Path, size: int, step: int) -> None:
    """The header, every step-th word of the file, and the bytes after its last word."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        header_end = min(size, 8 + int.from_bytes(content[:8], "little"))
        hasher.update(content[:header_end])
        whole = size // _WORD_BYTES * _WORD_BYTES
        piece = _PIECE_BYTES // (_WORD_BYTES * step) * _WORD_BYTES * step
        for start in range(0, whole, piece):
            with memoryview(content)[start : min(start + piece, whole)] as view, view.cast("Q") as words:
                hasher.update(words[::step].tobytes())
        hasher.update(content[whole:])
