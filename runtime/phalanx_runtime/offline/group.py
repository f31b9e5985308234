"""A local group: the server's supervisor and engine client in a thread of this process."""

import asyncio
import secrets
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from phalanx_frontend.metrics import RequestTotals
from phalanx_runtime.engine.backend import LocalBackend
from phalanx_runtime.engine.channel import EngineSocket
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.errors import ModelError
from phalanx_runtime.server.http.adapters import read_modules
from phalanx_runtime.server.http.metrics import EngineMetrics
from phalanx_runtime.server.launch import make_parts
from phalanx_runtime.server.supervision.ranks import RANK_COMMAND
from phalanx_runtime.server.supervision.supervisor import LeaderSupervisor, PodPlace
from phalanx_runtime.settings import ServeSettings

T = TypeVar("T")
CLOSE_S = 10.0
"""Timeout for the ranks' exit; they are killed after one second."""


class GroupEnded(RuntimeError):
    """The group was closed or failed; the message has the reason."""


class LocalGroup:
    """The server's engine without HTTP. Its ranks exit on `close` or with this process."""

    def __init__(
        self,
        settings: ServeSettings,
        rank_command: Sequence[str] = RANK_COMMAND,
        supervisor: type[LeaderSupervisor] = LeaderSupervisor,
    ) -> None:
        """Returns when every rank is ready. Raises ModelError when the first start fails."""
        self.backend: LocalBackend
        self._settings = settings
        self._command = rank_command
        self._supervisor = supervisor
        self._ready: Future[None] = Future()
        self._end_reason = "the engine was closed"
        self._is_ending = False
        self._end_lock = threading.Lock()
        """Prevents that work starts after the close, and that the loop closes while it gets work."""
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run_loop, name="phalanx engine", daemon=True)
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether the group has ended."""
        return not self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine on the group's event loop; an interrupt cancels it. Raises GroupEnded."""
        with self._end_lock:
            if self._is_ending:
                work.close()
                raise GroupEnded(self._end_reason)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise GroupEnded(self._end_reason) from error
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stops ranks and thread. Idempotent."""
        with self._end_lock:
            if not self._is_ending:  # else the thread closes the loop, or has closed it
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(CLOSE_S)

    def _run_loop(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._end_reason = f"the engine ended: {error}"
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            with self._end_lock:
                self._is_ending = True
            self._loop.run_until_complete(_cancel_other_tasks())
            self._loop.close()

    async def _serve(self) -> None:
        settings, stop = self._settings, threading.Event()
        metrics = EngineMetrics(CollectorRegistry(), settings.model.served_names[0], RequestTotals())
        client = EngineClient(metrics, EngineSocket())
        client.adapters.configure(read_modules(settings.model.lora_modules, settings.engine.max_lora_rank))
        self.backend = LocalBackend(client)
        client.subscribe(lambda: self._report_start(client))
        own_tokens = (secrets.token_hex(32),)
        place = PodPlace(
            pod=0,
            num_pods=1,
            leader_host=settings.group.leader_host,
            port=settings.group.master_port,
            tokens=lambda: own_tokens,
        )
        supervisor = asyncio.create_task(self._supervisor(place, make_parts(settings, stop, self._command), client).run())
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait([supervisor, closing], return_when=asyncio.FIRST_COMPLETED)
            if supervisor.done() and (error := supervisor.exception()) is not None:
                self._end_reason = f"the engine ended: {error}"
                raise error
        finally:
            stop.set()
            client.stop(self._end_reason)
            supervisor.cancel()
            closing.cancel()
            await asyncio.gather(supervisor, closing, return_exceptions=True)
            client.close()

    def _report_start(self, client: EngineClient) -> None:
        """Reports the first start; the supervisor handles later failures."""
        state = client.state()
        if self._ready.done():
            return
        if state.serving:
            self._ready.set_result(None)
        elif state.incarnation > 1:
            self._ready.set_exception(ModelError(state.reason))


async def _cancel_other_tasks() -> None:
    """Cancels all other tasks, so that no caller of `run` waits forever."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
