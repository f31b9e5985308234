"""Whether two models speak of the same tokens: a draft proposes ids, and the target must mean the same by them."""

import json
from pathlib import Path

from phalanx_runtime.errors import ModelError


def difference(target: Path, draft: Path) -> str | None:
    """A token that has other ids in these two model folders, in words; None when the tokenizers agree. Raises ModelError."""
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
    """The token of each id."""
    try:
        read = json.loads(content)
        vocabulary = read["model"]["vocab"]
        if isinstance(vocabulary, dict):
            found = {int(token): str(word) for word, token in vocabulary.items()}
        else:  # unigram: a list of words with their scores
            found = {token: str(word) for token, (word, _) in enumerate(vocabulary)}
        return found | {int(added["id"]): str(added["content"]) for added in read.get("added_tokens", [])}
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is not understood: {error!r}") from error
