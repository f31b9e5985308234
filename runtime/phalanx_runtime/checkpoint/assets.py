"""Assets of a model folder for the API server: tokenizer, chat template, generation config, limits."""

import json
from pathlib import Path

from phalanx_api import wire
from phalanx_runtime.checkpoint.folder import read_json
from phalanx_runtime.errors import ModelError

_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json")


def read_assets(folder: Path, served_names: list[str], max_model_len: int | None) -> wire.Assets:
    """Reads the folder's assets. `max_model_len` None: the model's `max_position_embeddings`.

    Raises ModelError when tokenizer.json or config.json is missing or invalid, or `max_model_len` exceeds the model's positions.
    """
    files = {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}
    if "tokenizer.json" not in files:
        raise ModelError(f"{folder} has no tokenizer.json")
    config = read_json(folder / "config.json")
    length, ends = _max_model_len(folder, config, max_model_len), _eos_token_ids(folder, config)
    vocab_size = config.get("vocab_size")
    return wire.make_assets(files, served_names, length, ends, vocab_size if isinstance(vocab_size, int) else None)


def _max_model_len(folder: Path, config: dict[str, object], asked: int | None) -> int:
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions < 1:
        if asked is None:
            raise ModelError(f"{folder}/config.json: max_position_embeddings must be a positive integer, it is {positions!r}")
        return asked
    if asked is not None and asked > positions:
        raise ModelError(f"--max-model-len {asked} is more than the model's max_position_embeddings, {positions}")
    return positions if asked is None else asked


def read_eos_token_ids(folder: Path) -> list[int]:
    """End tokens of this model; may be empty. Raises ModelError."""
    return _eos_token_ids(folder, read_json(folder / "config.json"))


def _eos_token_ids(folder: Path, config: dict[str, object]) -> list[int]:
    """End tokens from generation_config.json, else config.json, else by name from tokenizer_config.json; may be empty."""
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    for source in (generation, config):
        ids = _ids(source.get("eos_token_id"))
        if ids:
            return ids
    return _eos_by_name(folder)


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]


def _eos_by_name(folder: Path) -> list[int]:
    path = folder / "tokenizer_config.json"
    named = read_json(path).get("eos_token") if path.is_file() else None
    token = named.get("content") if isinstance(named, dict) else named
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


# A draft model must have the target's token ids.


def tokenizer_difference(target: Path, draft: Path) -> str | None:
    """Description of a token with different ids in the two folders; None when the tokenizers agree. Raises ModelError."""
    files = [folder / "tokenizer.json" for folder in (target, draft)]
    try:
        contents = [file.read_bytes() for file in files]
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror or error}") from error
    if contents[0] == contents[1]:
        return None
    theirs, own = (_tokens(file, content) for file, content in zip(files, contents, strict=True))
    for token in sorted(set(theirs) | set(own)):
        if theirs.get(token) != own.get(token):
            return f"token {token} is {_said(own.get(token))} in {draft} and {_said(theirs.get(token))} in {target}"
    return None


def _said(token: str | None) -> str:
    return "none" if token is None else repr(token)


def _tokens(file: Path, content: bytes) -> dict[int, str]:
    """Tokens by id."""
    try:
        read = json.loads(content)
        vocabulary = read["model"]["vocab"]
        if isinstance(vocabulary, dict):
            found = {int(token): str(word) for word, token in vocabulary.items()}
        else:  # unigram: a list of pieces with their scores
            found = {token: str(word) for token, (word, _) in enumerate(vocabulary)}
        return found | {int(added["id"]): str(added["content"]) for added in read.get("added_tokens", [])}
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is not understood: {error!r}") from error
