"""Serves transformers as completions API.

    python -m bench.peers.transformers_server MODEL PORT DTYPE generate|continuous

continuous: `bench.peers.transformers_batching`. generate: waiting requests form left-padded batches of at most 16, each output
cut to its `max_tokens`. One request alone is streamed by token, a batch arrives as a whole, as `generate` returns it.
"""

import asyncio
import json
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

BATCH = 16


@dataclass(slots=True)
class QueuedRequest:
    """One request and the queue for its tokens; `None` ends it."""

    prompt: list[int]
    max_tokens: int
    tokens: "asyncio.Queue[list[int] | None]" = field(default_factory=asyncio.Queue)


class Streamer:
    """Sends each step's token to the event loop; the first call is the prompt."""

    def __init__(self, loop: asyncio.AbstractEventLoop, request: QueuedRequest) -> None:
        self._loop = loop
        self._request = request
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self._loop.call_soon_threadsafe(self._request.tokens.put_nowait, value.flatten().tolist())
        self._is_prompt = False

    def end(self) -> None:
        """Does nothing."""


async def generate_all(model: Any, queue: "asyncio.Queue[QueuedRequest]") -> None:
    """Generates batch after batch, forever."""
    loop = asyncio.get_running_loop()
    while True:
        batch = [await queue.get()]
        while not queue.empty() and len(batch) < BATCH:
            batch.append(queue.get_nowait())
        streamer = Streamer(loop, batch[0]) if len(batch) == 1 else None
        rows = await asyncio.to_thread(generate_batch, model, batch, streamer)
        for request, row in zip(batch, rows, strict=True):
            if streamer is None:
                request.tokens.put_nowait(row[: request.max_tokens])
            request.tokens.put_nowait(None)


@torch.inference_mode()
def generate_batch(model: Any, batch: list[QueuedRequest], streamer: Streamer | None) -> list[list[int]]:
    longest = max(len(request.prompt) for request in batch)
    ids = torch.tensor([[0] * (longest - len(request.prompt)) + request.prompt for request in batch])
    mask = torch.tensor([[0] * (longest - len(request.prompt)) + [1] * len(request.prompt) for request in batch])
    count = max(request.max_tokens for request in batch)
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "streamer": streamer, "pad_token_id": 0}
    rows: list[list[int]] = model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()
    return rows


async def completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    queued = QueuedRequest(body["prompt"], body["max_tokens"])
    request.app["queue"].put_nowait(queued)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    count = 0
    while (tokens := await queued.tokens.get()) is not None:
        count += len(tokens)
        await response.write(f"data: {json.dumps({'choices': [{'text': ' t' * len(tokens)}]})}\n\n".encode())
    usage = {"prompt_tokens": len(queued.prompt), "completion_tokens": count}
    await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
    return response


async def health(request: web.Request) -> web.Response:
    return web.Response()


async def serve(folder: str, port: int, dtype: str, batching: str) -> None:
    if batching == "continuous":
        from bench.peers.transformers_batching import generate_all as generate
    else:
        generate = generate_all
    app = web.Application(client_max_size=1 << 24)
    app["queue"] = asyncio.Queue[QueuedRequest]()
    app.add_routes([web.post("/v1/completions", completions), web.get("/health", health)])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await generate(model, app["queue"])


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]))
