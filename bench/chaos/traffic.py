"""Clients that stream one answer after the other, each in a thread, and count how answers ended."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import httpx

TOKENS = 120


class Traffic:
    """So many clients until `stop`. `served` hears of each token."""

    def __init__(self, url: str, model: str, clients: int, served: Callable[[], None]) -> None:
        self._url = url
        self._model = model
        self._served = served
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.ends: Counter[str] = Counter()
        """Answers by how they ended: whole, or what was wrong."""
        self._threads = [threading.Thread(target=self._ask_on, args=(number,), daemon=True) for number in range(clients)]

    def start(self) -> None:
        """Begins."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> Counter[str]:
        """How answers ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        return self.ends

    def _ask_on(self, number: int) -> None:
        asked = 0
        while not self._stop.is_set():
            asked += 1
            try:
                end = self._ask(f"client {number} asks number {asked}", seed=1000 * number + asked)
            except httpx.HTTPError as error:
                end = type(error).__name__
            with self._lock:
                self.ends[end] += 1
            if end != "whole":
                self._stop.wait(0.5)

    def _ask(self, prompt: str, seed: int) -> str:
        extra = {"ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        body = {"model": self._model, "prompt": prompt, "seed": seed, "max_tokens": TOKENS, "stream": True, **extra}
        tokens = 0
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=httpx.Timeout(90, connect=5)) as response:
            if response.status_code != 200:
                return refusal_of(response.status_code, response.read())
            for line in lines_of(response.iter_bytes()):
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return f"error {event['error'].get('code')}"
                tokens += sum(len(choice.get("token_ids") or []) for choice in event["choices"])
                self._served()
        return "whole" if tokens == TOKENS else f"{tokens} of {TOKENS} tokens"


def refusal_of(status: int, body: bytes) -> str:
    """How an answer that is no stream is counted: its status, and the code of our error or else how its text begins, which tells
    an answer of ours from that of whoever has an address now that was a router's."""
    try:
        return f"HTTP {status} {json.loads(body)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status} {body[:80].decode(errors='replace')!r}"


def lines_of(chunks: Iterable[bytes]) -> Iterator[str]:
    """Whole lines. Only a newline ends one: a text may have other characters that `str.splitlines` takes for ends."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode() for line in whole)
