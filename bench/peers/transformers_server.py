"""transformers behind the completions API: `python -m bench.peers.transformers_server MODEL PORT DTYPE generate|continuous`.

continuous is `bench.peers.transformers_batching`. With generate, requests that wait are answered together, at most 16 in one
left-padded batch, each cut to the tokens that it asked for. One request alone is streamed token by token; a batch comes whole,
which is all that `generate` gives.
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
class Waiting:
    """One request: its prompt, and where its tokens go."""

    prompt: list[int]
    max_tokens: int
    tokens: "asyncio.Queue[list[int] | None]" = field(default_factory=asyncio.Queue)


class Streamer:
    """Hands each step's token to the loop; the first call is the prompt."""

    def __init__(self, loop: asyncio.AbstractEventLoop, one: Waiting) -> None:
        self._loop = loop
        self._one = one
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then one token after another."""
        if not self._is_prompt:
            self._loop.call_soon_threadsafe(self._one.tokens.put_nowait, value.flatten().tolist())
        self._is_prompt = False

    def end(self) -> None:
        """Nothing to flush."""


async def work(model: Any, waiting: "asyncio.Queue[Waiting]") -> None:
    """Answers batch after batch, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        batch = [await waiting.get()]
        while not waiting.empty() and len(batch) < BATCH:
            batch.append(waiting.get_nowait())
        streamer = Streamer(loop, batch[0]) if len(batch) == 1 else None
        rows = await asyncio.to_thread(generated, model, batch, streamer)
        for one, row in zip(batch, rows, strict=True):
            if streamer is None:
                one.tokens.put_nowait(row[: one.max_tokens])
            one.tokens.put_nowait(None)


@torch.inference_mode()
def generated(model: Any, batch: list[Waiting], streamer: Streamer | None) -> list[list[int]]:
    """The new tokens of each request."""
    longest = max(len(one.prompt) for one in batch)
    ids = torch.tensor([[0] * (longest - len(one.prompt)) + one.prompt for one in batch])
    mask = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in batch])
    count = max(one.max_tokens for one in batch)
    how = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "streamer": streamer, "pad_token_id": 0}
    rows: list[list[int]] = model.generate(ids, attention_mask=mask, **how)[:, longest:].tolist()
    return rows


async def completions(request: web.Request) -> web.StreamResponse:
    """The stream of one completion of a prompt of token ids."""
    body = await request.json()
    one = Waiting(body["prompt"], body["max_tokens"])
    request.app["waiting"].put_nowait(one)
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    count = 0
    while (tokens := await one.tokens.get()) is not None:
        count += len(tokens)
        await answer.write(f"data: {json.dumps({'choices': [{'text': ' t' * len(tokens)}]})}\n\n".encode())
    usage = {"prompt_tokens": len(one.prompt), "completion_tokens": count}
    await answer.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
    return answer


async def health(request: web.Request) -> web.Response:
    """Yes."""
    return web.Response()


async def serve(folder: str, port: int, dtype: str, batching: str) -> None:
    """Serves until the process is ended."""
    if batching == "continuous":
        from bench.peers.transformers_batching import work as answer
    else:
        answer = work
    app = web.Application(client_max_size=1 << 24)
    app["waiting"] = asyncio.Queue[Waiting]()
    app.add_routes([web.post("/v1/completions", completions), web.get("/health", health)])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await answer(model, app["waiting"])


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]))
