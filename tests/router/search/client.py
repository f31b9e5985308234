"""A client that resumes: when its connection ends or falls silent, it continues its stream at any router."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from websockets.exceptions import ConnectionClosedError

from bench.virtual.net import Network, Process, Socket
from phalanx_api import wire
from tests.router.search.calls import Call, Chunk, decode_chunk, encode
from tests.router.search.plan import Ask
from tests.router.search.router import copy_of
from tests.runtime.fake_runner import expected_output, next_token

CONNECT_S, SILENCE_S, PAUSE_S = 3.0, 15.0, 0.3
"""Seconds to connect, of silence after which it reconnects (a router sends something every 5 s), and between attempts."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A stream that a client had to start again. `code`: of the error, or `connection`."""

    at: float
    code: str
    num_tokens: int


@dataclass(slots=True)
class Reading:
    """What a client has read of one request."""

    tokens: list[int] = field(default_factory=list)
    finish: wire.FinishReason | None = None
    num_attempts: int = 0
    num_resumed: int = 0
    losses: list[Loss] = field(default_factory=list)
    has_left: bool = False
    reconnected_at: float | None = None
    """When the client left its router, to resume."""
    resumed: list[int] = field(default_factory=list)
    """Tokens that it had at each resume."""
    breaks: list[int] = field(default_factory=list)
    """First tokens that no group samples after the ones before, if groups sample different tokens."""
    ended_at: float | None = None


class Retry(Exception):
    """The router asks to try again."""

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self.after_s = after_s


class Lost(Exception):
    """The router does not continue the stream."""


class StreamClient:
    """Reads one stream."""

    def __init__(
        self,
        ask: Ask,
        machine: Process,
        net: Network,
        pick: Callable[[], str | None],
        report: Callable[[str], None],
        salts: Sequence[int] = (0,),
    ) -> None:
        """salts: of the groups that sample different tokens; the list grows."""
        self.ask = ask
        self.reading = Reading()
        self.request = make_request(ask)
        self.expected = expected_output(self.request)
        self._dial = net.dial_from(machine)
        self._pick = pick
        self._report = report
        self._salts = salts

    @property
    def has_ended(self) -> bool:
        """Whether the stream is complete, or its client has left."""
        return self.reading.ended_at is not None

    async def run(self) -> None:
        """Reads until the stream ends."""
        reading, loop = self.reading, asyncio.get_running_loop()
        while reading.finish is None and not reading.has_left:
            try:
                await self._attempt()
            except (OSError, TimeoutError, ConnectionClosedError):
                reading.has_left = self.ask.leaves_on_loss
                await asyncio.sleep(PAUSE_S)
                if not self.request.can_resume:
                    self._start_again("connection")
            except Retry as retry:
                await asyncio.sleep(max(PAUSE_S, min(retry.after_s, 5.0)))
            except Lost as lost:
                self._start_again(str(lost))
                await asyncio.sleep(PAUSE_S)
        reading.ended_at = loop.time()

    def _start_again(self, code: str) -> None:
        if self.reading.tokens or code != "connection":
            self.reading.losses.append(Loss(asyncio.get_running_loop().time(), code, len(self.reading.tokens)))
        self._check()
        self.reading.tokens = []

    def _check(self) -> None:
        """Reports tokens that an undisturbed group would not generate."""
        tokens, expected = self.reading.tokens, self.expected
        if len(self._salts) > 1:
            self.reading.breaks += self._first_break(tokens)
        elif tokens != expected[: len(tokens)]:
            index = next((i for i, (have, want) in enumerate(zip(tokens, expected, strict=False)) if have != want), len(expected))
            self._report(f"changed: {self.request.id} has another token at index {index}")

    def _first_break(self, tokens: list[int]) -> list[int]:
        """Returns the index of the first token that no group samples after the tokens before it; none if there is no such."""
        seed, salts = self.request.sampling.seed, list(self._salts)
        for index, token in enumerate(tokens):
            context = self.request.prompt + tokens[:index]
            found = next((salt for salt in salts if next_token(context, seed + salt) == token), None)
            if found is None:
                return [index]
            salts.insert(0, salts.pop(salts.index(found)))  # most likely of the next one too
        return []

    @property
    def _is_whole(self) -> bool:
        tokens, sampling = self.reading.tokens, self.request.sampling
        if len(self._salts) == 1:
            return tokens == self.expected
        return len(tokens) == sampling.max_tokens or tokens[-1:] in [[token] for token in sampling.stop_token_ids]

    async def _attempt(self) -> None:
        reading = self.reading
        router = self._pick()
        if router is None:
            raise Retry(1.0)
        reading.num_attempts += 1
        resumes = bool(reading.tokens)
        if not resumes:
            self.request = copy_of(self.request, reading.num_attempts)
        reading.num_resumed += resumes
        reading.resumed += [len(reading.tokens)] if resumes else []
        async with self._dial(f"{router}/http", "", CONNECT_S, None) as socket:
            await socket.send(encode(Call("generate", self.request, len(reading.tokens) if resumes else -1)))
            while reading.finish is None and not reading.has_left:
                async with asyncio.timeout(SILENCE_S):
                    chunk = decode_chunk(await socket.recv())
                self._take(chunk, socket)

    def _take(self, chunk: Chunk, socket: Socket) -> None:
        reading, ask = self.reading, self.ask
        if chunk.code:
            self._take_error(chunk)
        if chunk.tokens and chunk.index != len(reading.tokens):
            self._report(f"index: {self.request.id} got index {chunk.index} after {len(reading.tokens)} tokens")
        reading.tokens += chunk.tokens
        if chunk.finish is not None:
            reading.finish = chunk.finish
            if not self._is_whole:
                self._report(f"whole: {self.request.id} ended with {len(reading.tokens)} tokens of {len(self.expected)}")
            self._check()
            return
        if ask.leaves_after is not None and len(reading.tokens) >= ask.leaves_after:
            reading.has_left = True
            self._check()
        elif ask.reconnects_after is not None and len(reading.tokens) >= ask.reconnects_after and reading.reconnected_at is None:
            reading.reconnected_at = asyncio.get_running_loop().time()
            raise Retry(0.0)

    def _take_error(self, chunk: Chunk) -> None:
        """Raises Retry or Lost."""
        has_begun = bool(self.reading.tokens)
        if (chunk.can_resume and has_begun) or (chunk.status in (429, 503) and not has_begun):
            raise Retry(chunk.retry_after_s)
        raise Lost(chunk.code)


def make_request(ask: Ask) -> wire.Request:
    """Returns the request of a client."""
    sampling = wire.Sampling(max_tokens=ask.max_tokens, seed=ask.seed, stop_token_ids=ask.stop)
    return wire.Request(
        id=f"r{ask.number}.0", epoch=0, prompt=ask.prompt, delivered=[], sampling=sampling, can_resume=ask.can_resume
    )
