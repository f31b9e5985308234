"""Measures CPU time of the API server per streamed token: detokenize, encode, send.

    python bench/router/api_server.py [--streams 32] [--tokens 500]

alone: the application without a server, tokens ready at once. saturated: uvicorn and `--streams` streams, the next step starts
when every stream has its token; a client process reads and discards. paced: the same with a step every 10 ms, so that each token
wakes the server. Prints this process's CPU time per token, without the client's.
"""

import argparse
import asyncio
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.backend import Delta, KeepAlive, ResumableStream

NAME = "bench"
EMBEDDING_SIZE = 1024


def bench_assets() -> wire.Assets:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: id for id, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    embedding = msgspec.json.encode(wire.Embedding(size=EMBEDDING_SIZE, pooling="mean"))
    return wire.make_assets(
        {"tokenizer.json": tokenizer.to_str().encode(), wire.EMBEDDING_FILE: embedding}, [NAME], 1_000_000, []
    )


class SteppedBackend:
    """An engine that gives every stream a token per step; with `period_s=0` the next step starts at once."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._assets = bench_assets()
        self._waiting: list[asyncio.Future[None]] = []
        self._running = 0

    async def generate(self, request: wire.Request) -> AsyncIterator[Delta | KeepAlive]:
        last = request.sampling.max_tokens - 1
        self._running += 1
        for index in range(last + 1):
            await self._next_step()
            yield Delta(index=index, tokens=[40 + index % 50], finish="length" if index == last else None)

    def check_quota(self, tenant: str, prompt_tokens: int) -> None:
        """Accepts all."""

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, ResumableStream]:
        return {}

    async def wait_for_assets(self, name: str = "") -> None:
        """Returns at once."""

    def assets(self) -> wire.Assets:
        return self._assets

    def not_ready(self) -> str | None:
        return None

    async def _next_step(self) -> None:
        loop = asyncio.get_running_loop()
        step: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_later(self._period_s, self._step)
        self._waiting.append(step)
        await step

    def _step(self) -> None:
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            if not step.done():
                step.set_result(None)


class ImmediateBackend(SteppedBackend):
    async def _next_step(self) -> None:
        pass


def body_of(num_tokens: int) -> bytes:
    return f'{{"prompt":"hello","stream":true,"ignore_eos":true,"max_tokens":{num_tokens}}}'.encode()


async def run_alone(app: FastAPI, num_tokens: int) -> float:
    bodies = [{"type": "http.request", "body": body_of(num_tokens), "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if bodies:
            return bodies.pop()
        await asyncio.Event().wait()
        raise AssertionError("never set")

    async def send(message: MutableMapping[str, Any]) -> None:
        pass

    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
        "query_string": b"", "root_path": "", "scheme": "http", "headers": [(b"content-type", b"application/json")],
        "client": None, "server": None,
    }  # fmt: skip
    call: Callable[..., Awaitable[None]] = app
    before = time.process_time()
    await call(scope, receive, send)
    return time.process_time() - before


def read_streams(port: int, num_streams: int, num_tokens: int) -> None:
    """Reads all streams at once and discards the bytes."""

    async def read_one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = body_of(num_tokens)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
        while await reader.read(1 << 20):
            pass
        writer.close()

    async def read_all() -> None:
        await asyncio.gather(*(read_one() for _ in range(num_streams)))

    asyncio.run(read_all())


async def run_client(port: int, num_streams: int, num_tokens: int) -> None:
    client = multiprocessing.get_context("spawn").Process(target=read_streams, args=(port, num_streams, num_tokens))
    client.start()
    await asyncio.to_thread(client.join)


async def run_served(app: FastAPI, num_streams: int, num_tokens: int) -> float:
    """Returns the server's CPU seconds for all streams."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    port = listener.getsockname()[1]
    await run_client(port, num_streams, 1)  # the first requests load tokenizer and lazy imports
    before = time.process_time()
    await run_client(port, num_streams, num_tokens)
    cpu_s = time.process_time() - before
    server.should_exit = True
    await serving
    return cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=500, help="per stream")
    options = parser.parse_args()
    total = options.streams * options.tokens
    alone_s = asyncio.run(run_alone(create_app(ImmediateBackend(0)), total))
    print(f"alone      {alone_s / total * 1e6:6.1f} us per token")
    for name, period_s in (("saturated", 0.0), ("paced", 0.010)):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            cpu_s = runner.run(run_served(create_app(SteppedBackend(period_s)), options.streams, options.tokens))
        print(f"{name:10} {cpu_s / total * 1e6:6.1f} us per token, {options.streams} streams")


if __name__ == "__main__":
    main()
