"""Logprobs in the forms of OpenAI and vLLM."""

from collections.abc import Sequence
from typing import Any

from phalanx_api import wire
from phalanx_frontend.stream.reply import ShownFields, ShownToken
from phalanx_frontend.text.tokenizer import TextTokenizer

MIN_LOGPROB = -9999.0
"""Replaces -inf, which JSON lacks."""


class Spelling:
    """Spelling of tokens, with incomplete characters escaped as at OpenAI."""

    def __init__(self, tokenizer: TextTokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def completion(self, id: int) -> str:
        """Returns a token in a completion: its text, or `bytes:\\xf0\\x9f`."""
        return self._spell(id, "bytes:")

    def chat(self, id: int) -> str:
        """Returns a token in a chat: its text, or `\\xf0\\x9f`."""
        return self._spell(id, "")

    def bytes(self, id: int) -> list[int] | None:
        """Returns the UTF-8 bytes of a token."""
        raw = self._tokenizer.token_bytes(id)
        return None if raw is None else list(raw)

    def text(self, id: int) -> str:
        """Returns a token's text, with U+FFFD for incomplete characters."""
        return (self._tokenizer.token_bytes(id) or b"").decode(errors="replace")

    def _spell(self, id: int, escaped: str) -> str:
        raw = self._tokenizer.token_bytes(id)
        if raw is None or self._as_ids:
            return f"token_id:{id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return escaped + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(tokens: Sequence[ShownToken], shown: ShownFields, spelling: Spelling, offset: int) -> dict[str, Any]:
    """Returns `logprobs` of a completion. `offset`: characters before its own output."""
    return {
        "text_offset": [offset + token.start for token in tokens],
        "token_logprobs": [None if token.detail is None else _finite(token.detail.logprob) for token in tokens],
        "tokens": [spelling.completion(token.id) for token in tokens],
        "top_logprobs": [None if token.detail is None else _by_text(token.id, token.detail, shown, spelling) for token in tokens],
    }


def _by_text(id: int, detail: wire.TokenDetail, shown: ShownFields, spelling: Spelling) -> dict[str, float]:
    """Returns the top tokens and the token itself; of equal texts the more probable."""
    found: dict[str, float] = {}
    for top, logprob in _tops(detail, shown.logprobs):
        found.setdefault(spelling.completion(top), _finite(logprob))
    found.setdefault(spelling.completion(id), _finite(detail.logprob))
    return found


def chat_logprobs(tokens: Sequence[ShownToken], shown: ShownFields, spelling: Spelling) -> dict[str, Any]:
    """Returns `logprobs` of a chat."""

    def entry(id: int, logprob: float) -> dict[str, Any]:
        return {"token": spelling.chat(id), "logprob": _finite(logprob), "bytes": spelling.bytes(id)}

    content = []
    for token in tokens:
        if token.detail is not None:
            tops = [entry(*top) for top in _tops(token.detail, shown.logprobs)]
            content.append({**entry(token.id, token.detail.logprob), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def prompt_logprobs(prompt: Sequence[int], details: Sequence[wire.TokenDetail], k: int, spelling: Spelling) -> list[Any]:
    """Returns vLLM's `prompt_logprobs`: null for the first token, then an object by token id. Ranks count from 1."""
    entries_by_token: list[Any] = [None]
    for id, detail in zip(prompt[1:], details, strict=True):
        entries: dict[str, Any] = {}
        for rank, (top, logprob) in enumerate(_tops(detail, k), 1):
            entries[str(top)] = {"logprob": _finite(logprob), "rank": rank, "decoded_token": spelling.text(top)}
        own = {"logprob": _finite(detail.logprob), "rank": detail.rank + 1, "decoded_token": spelling.text(id)}
        entries_by_token.append({str(id): own, **entries} if str(id) not in entries else entries)
    return entries_by_token


def _tops(detail: wire.TokenDetail, k: int | None) -> list[tuple[int, float]]:
    """Returns at most `k` top tokens."""
    return list(zip(detail.top_ids, detail.top_logprobs, strict=True))[: k or 0]


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
