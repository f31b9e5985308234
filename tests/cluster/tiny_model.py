"""Tiny random models of the cluster's scenarios, of a few hundred KB, made once into the cache, where pods can mount them."""

from pathlib import Path

from tests.runtime import tiny
from tools.cache import cache_root, finished, key_of

NAME, OTHER = "tiny", "other"
"""Equal but for their weights."""
DRAFT, BROKEN, OTHER_TOKENS = "draft", "broken-draft", "draft-of-other-tokens"
"""Smaller models of the first: one that agrees with it often, one without weights, and one with another token for an id."""
MAX_LEN = 4096


def folder() -> Path:
    """The folder that holds all models' folders."""

    def make(part: Path) -> None:
        from tests.runtime import drafts  # torch, which takes seconds: only once

        for seed, name in enumerate((NAME, OTHER)):
            tiny.save_tiny(part / name, seed=seed, max_position_embeddings=MAX_LEN)
        drafts.save_draft(part / NAME, part / DRAFT)
        (drafts.save_draft(part / NAME, part / BROKEN) / "model.safetensors").write_text("no tensors")
        words = drafts.save_draft(part / NAME, part / OTHER_TOKENS) / "tokenizer.json"
        words.write_text(words.read_text().replace("<unused300>", "<hello>"))
        for path in part.glob("*/*"):
            path.chmod(0o644)  # pods do not run as the user who made it

    sources = (Path(tiny.__file__), Path(tiny.__file__).with_name("drafts.py"), Path(__file__))
    return finished(cache_root() / f"models-tiny-{key_of(*(source.read_bytes() for source in sources))}", make)
