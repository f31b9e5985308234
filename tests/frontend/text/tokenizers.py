"""Small tokenizers of each decoder kind."""

import json
from typing import Any

from tests.frontend.fakes import tiny_tokenizer_json

WORD_START = "▁"


def byte_level() -> bytes:
    """GPT-2, Llama 3, Qwen."""
    return tiny_tokenizer_json()


def sentencepiece(strip: bool = True) -> bytes:
    """Llama 2 and Mistral, or Gemma without the strip: word starts, byte fallback, special tokens."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [WORD_START, f"{WORD_START}once", "upon", f"{WORD_START}a", "é", "€", "🦊", f"{WORD_START}{WORD_START}", "<0xZZ>"]
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": WORD_START}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strip:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _document(words, {"type": "Sequence", "decoders": steps}, byte_fallback=True)


def metaspace(prepend_scheme: str = "always") -> bytes:
    """T5 and its family."""
    words = ["<unk>", "<s>", "</s>", f"{WORD_START}once", "upon", f"{WORD_START}a", "é", f"{WORD_START}{WORD_START}b"]
    decoder = {"type": "Metaspace", "replacement": WORD_START, "prepend_scheme": prepend_scheme, "split": True}
    return _document(words, decoder)


def without_decoder() -> bytes:
    """Tokens joined by spaces."""
    return _document(["<unk>", "<s>", "</s>", "once", "upon", "a", "time"], None)


def word_pieces() -> bytes:
    """A decoder without a piece rule."""
    words = ["<unk>", "<s>", "</s>", "once", "##upon", "a", "##s"]
    return _document(words, {"type": "WordPiece", "prefix": "##", "cleanup": False})


def _document(words: list[str], decoder: dict[str, Any] | None, byte_fallback: bool = False) -> bytes:
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {
        "type": "BPE", "vocab": {word: id for id, word in enumerate(words)}, "merges": [],
        "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": byte_fallback,
    }  # fmt: skip
    return json.dumps(
        {
            "version": "1.0",
            # As saved by a trainer: neither may affect a prompt.
            "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            "padding": None,
            "added_tokens": [{"id": id, "content": words[id], **special} for id in range(3)],
            "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": decoder, "model": model,
        }
    ).encode()  # fmt: skip
