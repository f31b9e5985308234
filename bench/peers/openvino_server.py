"""Serves OpenVINO GenAI, which has no server, as completions API.

    python openvino_server.py MODEL PORT KV_GIB

Runs in OpenVINO's own environment. One thread steps the pipeline; events are sent as the pipeline returns tokens.
"""

import asyncio
import json
import sys
import threading
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]
from aiohttp import web


class Engine:
    def __init__(self, folder: str, kv_gib: int) -> None:
        limits = genai.SchedulerConfig()
        limits.cache_size = kv_gib
        limits.enable_prefix_caching = True
        limits.max_num_seqs = 64
        self._pipeline = genai.ContinuousBatchingPipeline(folder, limits, "CPU")
        self._waiting: list[tuple[list[int], int, Any]] = []
        self._running: dict[int, tuple[Any, Any]] = {}
        self._changed = threading.Condition()
        self._last_number = 0
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, tokens: list[int], max_tokens: int, put: Any) -> None:
        """Submits a request; calls `put` with new tokens, and with `None` at the end."""
        with self._changed:
            self._waiting.append((tokens, max_tokens, put))
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._running:
                    self._changed.wait()
                new, self._waiting = self._waiting, []
            for tokens, max_tokens, put in new:
                self._start(tokens, max_tokens, put)
            self._pipeline.step()
            for number, (handle, put) in list(self._running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        put(list(output.generated_ids))
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    del self._running[number]
                    put(None)

    def _start(self, tokens: list[int], max_tokens: int, put: Any) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        self._last_number += 1
        prompt = ov.Tensor(np.asarray([tokens], np.int64))
        self._running[self._last_number] = (self._pipeline.add_request(self._last_number, prompt, config), put)


async def completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
    engine: Engine = request.app["engine"]
    engine.submit(body["prompt"], body["max_tokens"], lambda tokens: loop.call_soon_threadsafe(queue.put_nowait, tokens))
    count = 0
    while (tokens := await queue.get()) is not None:
        count += len(tokens)
        await send(response, {"choices": [{"text": "".join(f" t{token}" for token in tokens)}]})
    await send(response, {"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}})
    await response.write(b"data: [DONE]\n\n")
    return response


async def send(response: web.StreamResponse, event: object) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


async def health(request: web.Request) -> web.Response:
    return web.Response()


if __name__ == "__main__":
    app = web.Application(client_max_size=1 << 24)
    app["engine"] = Engine(sys.argv[1], int(sys.argv[3]))
    app.add_routes([web.post("/v1/completions", completions), web.get("/health", health)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None)
