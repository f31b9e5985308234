"""Model hash: only groups with equal hashes exchange streams and pages.

    SHA-256 of: dtype, quantisation · config.json without irrelevant keys · tokenizer.json · for each weight file, by name:
    name, size, header (names, dtypes and shapes of tensors), and a sample of its content

The sample is every k-th 8-byte word, with the smallest odd k for at most `SAMPLE_BYTES` in total. It detects a training step on
any tensor, but not every change of single rows.
"""

import hashlib
import json
import mmap
from pathlib import Path

from phalanx_runtime.checkpoint.folder import GGUF_FILE, read_json, weight_files
from phalanx_runtime.errors import ModelError

SAMPLE_BYTES = 64 << 20
"""Takes about 0.25 s."""
GGUF_HEADER_BYTES = 16 << 20
"""Most bytes before the tensors of a GGUF file: those of its vocabulary and of the list of tensors."""
_WORD_BYTES = 8
PIECE_BYTES = 256 << 20
"""Bytes sampled at once, with the GIL held."""
_IRRELEVANT_KEYS = ("_name_or_path", "_model_name_or_path", "transformers_version")
"""Keys of config.json that do not affect the computation."""


def model_hash(folder: Path, dtype: str, quantization: str | None) -> str:
    """Returns the hash in hex. Blocks on file reads. Raises ModelError."""
    hasher = hashlib.sha256(f"phalanx model 1 {dtype} {quantization or 'none'}".encode())
    config = {key: value for key, value in read_json(folder / "config.json").items() if key not in _IRRELEVANT_KEYS}
    hasher.update(json.dumps(config, sort_keys=True).encode())
    try:
        hasher.update(hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest())
        if "vision_config" in config:  # how images become pixels
            for path in (folder / "preprocessor_config.json", folder / "processor_config.json"):
                hasher.update(path.read_bytes() if path.is_file() else b"-")
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
    """Returns the hash for any dtype. Raises ModelError."""
    return model_hash(folder, "any", None)


def _add_words(hasher: "hashlib._Hash", path: Path, size: int, step: int) -> None:
    """Hashes header, sampled words, and the bytes after the last whole word."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        header_end = min(size, GGUF_HEADER_BYTES if path.name == GGUF_FILE else 8 + int.from_bytes(content[:8], "little"))
        hasher.update(content[:header_end])
        whole = size // _WORD_BYTES * _WORD_BYTES
        piece = PIECE_BYTES // (_WORD_BYTES * step) * _WORD_BYTES * step
        for start in range(0, whole, piece):
            with memoryview(content)[start : min(start + piece, whole)] as view, view.cast("Q") as words:
                hasher.update(words[::step].tobytes())
        hasher.update(content[whole:])
