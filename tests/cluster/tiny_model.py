"""Tiny random models, cached on a path that pods can mount."""

from pathlib import Path

from tests.runtime import tiny
from tools.cache import cache_root, finished, key_of

NAME, OTHER = "tiny", "other"
"""Differs in its weights only."""
WIDE = "wide"
"""Has heads of 32 dimensions, as the kernels of batch invariance need, and a calibration of its pages."""
CALIBRATION = "pages.kv"
DRAFT, BROKEN, OTHER_TOKENS = "draft", "broken-draft", "draft-of-other-tokens"
"""Drafts of the first model: one that often agrees, one without weights, and one with a different token."""
MAX_LEN = 4096


def folder() -> Path:
    """Returns the folder above the models'."""

    def make(part: Path) -> None:
        from tests.runtime import drafts  # imports torch, which takes seconds

        for seed, name in enumerate((NAME, OTHER)):
            tiny.save_tiny(part / name, seed=seed, max_position_embeddings=MAX_LEN)
        tiny.save_tiny(part / WIDE, seed=2, max_position_embeddings=MAX_LEN, head_dim=32)
        tiny.save_calibration(part / WIDE, CALIBRATION)
        drafts.save_draft(part / NAME, part / DRAFT)
        (drafts.save_draft(part / NAME, part / BROKEN) / "model.safetensors").write_text("no tensors")
        tokenizer = drafts.save_draft(part / NAME, part / OTHER_TOKENS) / "tokenizer.json"
        tokenizer.write_text(tokenizer.read_text().replace("<unused300>", "<hello>"))
        for path in part.glob("*/*"):
            path.chmod(0o644)  # pods run as another user

    sources = (Path(tiny.__file__), Path(tiny.__file__).with_name("drafts.py"), Path(__file__))
    return finished(cache_root() / f"models-tiny-{key_of(*(source.read_bytes() for source in sources))}", make)
