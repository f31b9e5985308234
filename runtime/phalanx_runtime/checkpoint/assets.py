"""Model assets for the API server: tokenizer, chat template, generation config, limits."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

import msgspec

from phalanx_api import wire
from phalanx_runtime.checkpoint.folder import read_json
from phalanx_runtime.checkpoint.overrides import NO_OVERRIDES, AssetOverrides
from phalanx_runtime.checkpoint.vision import read_vision, text_config
from phalanx_runtime.errors import ModelError

MAX_COUNT = 2**31 - 1
AUTO = wire.ParserNames()
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
)


def read_assets(
    folder: Path,
    served_names: list[str],
    max_model_len: int | None,
    embedding: wire.Embedding | None = None,
    parsers: wire.ParserNames = AUTO,
    classification: wire.Classification | None = None,
    image_obstacle: str = "",
    overrides: AssetOverrides = NO_OVERRIDES,
) -> wire.Assets:
    """Reads the folder's assets. `max_model_len` defaults to `max_position_embeddings` and must not exceed it.

    `embedding`: of a model that computes embeddings. `parsers`: formats of its answers. `classification`: of a model with a head
    for it. `image_obstacle`: why the group takes no images, although the model does. `overrides`: replace parts of the files.
    Raises ModelError.
    """
    files = {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}
    if "tokenizer.json" not in files:
        raise ModelError(f"{folder} has no tokenizer.json")
    if embedding is not None:
        files[wire.EMBEDDING_FILE] = msgspec.json.encode(embedding)
    if classification is not None:
        files[wire.CLASSIFICATION_FILE] = msgspec.json.encode(classification)
    if parsers != AUTO:
        files[wire.PARSERS_FILE] = msgspec.json.encode(parsers)
    if (vision := read_vision(folder)) is not None:
        obstacle = vision.input.obstacle or image_obstacle
        files[wire.IMAGES_FILE] = msgspec.json.encode(msgspec.structs.replace(vision.input, obstacle=obstacle))
    config = text_config(read_json(folder / "config.json"))
    length, eos_token_ids = _max_model_len(folder, config, max_model_len), _eos_token_ids(folder, config)
    overrides.apply(files)
    vocab_size = config.get("vocab_size")
    return wire.make_assets(files, served_names, length, eos_token_ids, vocab_size if _is_count(vocab_size) else None)


def _max_model_len(folder: Path, config: Mapping[str, object], requested: int | None) -> int:
    positions = config.get("max_position_embeddings")
    if not _is_count(positions):
        if requested is None:
            raise ModelError(f"{folder}/config.json: max_position_embeddings must be a positive integer, it is {positions!r:.40}")
        return requested
    if requested is not None and requested > positions:
        raise ModelError(f"--max-model-len {requested} is more than the model's max_position_embeddings, {positions}")
    return positions if requested is None else requested


def read_eos_token_ids(folder: Path) -> list[int]:
    """Returns the end tokens; may be empty. Raises ModelError."""
    return _eos_token_ids(folder, text_config(read_json(folder / "config.json")))


def _eos_token_ids(folder: Path, config: Mapping[str, object]) -> list[int]:
    """Reads generation_config.json, else config.json, and the name in tokenizer_config.json: fine-tuning may change only that."""
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    ids = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    return ids + [token for token in _eos_by_name(folder) if token not in ids]


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and (item == 0 or _is_count(item))]


def _is_count(value: object) -> TypeGuard[int]:
    """Whether a value of a JSON document is a positive number of tokens or positions."""
    return isinstance(value, int) and 0 < value <= MAX_COUNT


def _eos_by_name(folder: Path) -> list[int]:
    path = folder / "tokenizer_config.json"
    eos_token = read_json(path).get("eos_token") if path.is_file() else None
    token = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
    if not isinstance(token, str):
        return []
    tokenizer = read_json(folder / "tokenizer.json")
    added = tokenizer.get("added_tokens")
    model = tokenizer.get("model")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == token:
            return _ids(entry.get("id"))
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return _ids(vocabulary.get(token)) if isinstance(vocabulary, dict) else []


def tokenizer_difference(target: Path, draft: Path) -> str | None:
    """Describes the first token id that differs between the folders, if any. Raises ModelError."""
    files = [folder / "tokenizer.json" for folder in (target, draft)]
    try:
        contents = [file.read_bytes() for file in files]
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror or error}") from error
    if contents[0] == contents[1]:
        return None
    target_tokens, draft_tokens = (_tokens(file, content) for file, content in zip(files, contents, strict=True))
    for token in sorted(set(target_tokens) | set(draft_tokens)):
        in_target, in_draft = target_tokens.get(token), draft_tokens.get(token)
        if in_target != in_draft:
            return f"token {token} is {_quoted(in_draft)} in {draft} and {_quoted(in_target)} in {target}"
    return None


def _quoted(token: str | None) -> str:
    return "none" if token is None else repr(token)


def _tokens(file: Path, content: bytes) -> dict[int, str]:
    try:
        tokenizer = json.loads(content)
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, dict):
            tokens = {int(token): str(word) for word, token in vocabulary.items()}
        else:  # unigram: pieces with their scores
            tokens = {token: str(word) for token, (word, _) in enumerate(vocabulary)}
        return tokens | {int(added["id"]): str(added["content"]) for added in tokenizer.get("added_tokens", [])}
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"cannot parse {file}: {error!r}") from error
