"""Frames that a link has yet to send, and the encoding of load reports."""

import asyncio

import msgspec

from phalanx_api import wire

BYTES_PER_TOKEN = 64
"""Bytes of a vector that count as one queued token, about the memory of one."""


class SendQueue:
    """Merges tokens into one frame and replaces load reports."""

    def __init__(self) -> None:
        self.is_load_due = False
        self.num_tokens = 0
        """Queued tokens, page changes and vectors."""
        self._frames: list[wire.FromLeader] = []
        self._wake = asyncio.Event()

    def add(self, frame: wire.FromLeader, num_tokens: int = 0) -> None:
        """Queues a frame."""
        self.num_tokens += num_tokens
        self._frames.append(frame)
        self._wake.set()

    def add_tokens(self, frame: wire.Tokens) -> None:
        """Queues tokens."""
        num_tokens = len(frame.handles) + sum(len(prompt.details) for prompt in frame.prompt_details)
        num_tokens += sum(len(end.vector) for end in frame.finished) // BYTES_PER_TOKEN
        last = self._frames[-1] if self._frames else None
        if isinstance(last, wire.Tokens):
            self.num_tokens += num_tokens
            _merge(last, frame)
        else:
            self.add(frame, num_tokens)

    def add_load(self) -> None:
        """Schedules the latest load report."""
        self.is_load_due = True
        self._wake.set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is due."""
        return not (self._frames or self.is_load_due)

    async def wait(self) -> None:
        """Returns once something is due."""
        await self._wake.wait()
        self._wake.clear()

    def take(self) -> list[wire.FromLeader]:
        """Takes all frames."""
        frames, self._frames = self._frames, []
        self.num_tokens = 0
        return frames


class LoadEncoder:
    """Encodes load reports. An idle group repeats its last one, which is encoded once."""

    def __init__(self) -> None:
        self._last: tuple[wire.Load, int, bytes] | None = None

    def encode(self, load: wire.Load, last_handle: int) -> bytes:
        """Returns the message of an engine's report with another `last_handle`."""
        if self._last is None or load is not self._last[0] or last_handle != self._last[1]:
            self._last = load, last_handle, wire.encode(msgspec.structs.replace(load, last_handle=last_handle))
        return self._last[2]


def _merge(into: wire.Tokens, frame: wire.Tokens) -> None:
    if into.details or frame.details:
        into.details.extend([None] * (len(into.handles) - len(into.details)))
        into.details.extend(frame.details or [None] * len(frame.handles))
    into.prompt_details.extend(frame.prompt_details)
    into.cached.extend(frame.cached)
    into.handles.extend(frame.handles)
    into.epochs.extend(frame.epochs)
    into.indices.extend(frame.indices)
    into.tokens.extend(frame.tokens)
    into.finished.extend(frame.finished)
