"""Clients that stream one answer after another, each in a thread, and count how answers end."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import httpx

from bench.chaos.questions import TOKENS, Question, chosen

OTHER_TOKENS = "other tokens than the reference"
"""End of a whole answer that is wrong."""


class Traffic:
    """Several clients until `stop`; they call `served` for each event. With `questions`, they ask these again and again."""

    def __init__(
        self, url: str, model: str, clients: int, served: Callable[[], None], questions: Sequence[Question] = ()
    ) -> None:
        self._url = url
        self._model = model
        self._served = served
        self._questions = questions
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.ends: Counter[str] = Counter()
        """Answers by outcome: completed, or the error."""
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(clients)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> Counter[str]:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        return self.ends

    def _run(self, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                end = self._stream(chosen(self._questions, number, count))
            except httpx.HTTPError as error:
                end = type(error).__name__
            with self._lock:
                self.ends[end] += 1
            if end != "completed":
                self._stop.wait(0.5)

    def _stream(self, question: Question) -> str:
        extra = {"ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        body = {"model": self._model, "prompt": question.prompt, "seed": question.seed, "max_tokens": TOKENS, "stream": True}
        body |= extra
        tokens: list[int] = []
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=httpx.Timeout(90, connect=5)) as response:
            if response.status_code != 200:
                return refusal_of(response.status_code, response.read())
            for line in lines_of(response.iter_bytes()):
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return f"error {event['error'].get('code')}"
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                self._served()
        if len(tokens) != TOKENS:
            return f"{len(tokens)} of {TOKENS} tokens"
        return "completed" if question.tokens in (None, tuple(tokens)) else OTHER_TOKENS


def refusal_of(status: int, body: bytes) -> str:
    """Describes a response without a stream: status, and our error code or the start of the text.

    Another text shows that a router's address now belongs to something else.
    """
    try:
        return f"HTTP {status} {json.loads(body)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status} {body[:80].decode(errors='replace')!r}"


def lines_of(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yields whole lines. Only a newline ends a line, unlike in `str.splitlines`."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode() for line in lines)
