"""Tiny random models of the cluster's scenarios, of a few hundred KB, made once into the cache, where pods can mount them."""

from pathlib import Path

from tests.runtime import tiny
from tools.cache import cache_root, finished, key_of

NAME, OTHER = "tiny", "other"
"""Equal but for their weights."""
MAX_LEN = 4096


def folder() -> Path:
    """The folder that holds both models' folders."""

    def make(part: Path) -> None:
        for seed, name in enumerate((NAME, OTHER)):
            for path in tiny.save_tiny(part / name, seed=seed, max_position_embeddings=MAX_LEN).iterdir():
                path.chmod(0o644)  # pods do not run as the user who made it

    return finished(cache_root() / f"models-tiny-{key_of(Path(tiny.__file__).read_bytes(), Path(__file__).read_bytes())}", make)
