"""A group of ranks in this process: the server's supervisor and engine client in a separate thread."""

import asyncio
import secrets
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from phalanx_frontend.metrics import RequestTotals
from phalanx_runtime.engine.backend import LocalBackend
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.errors import ModelError
from phalanx_runtime.server.http.metrics import EngineMetrics
from phalanx_runtime.server.serve import make_parts
from phalanx_runtime.server.supervision.ranks import RANK_COMMAND
from phalanx_runtime.server.supervision.supervisor import LeaderSupervisor, PodPlace
from phalanx_runtime.settings import ServeSettings

T = TypeVar("T")
CLOSE_S = 10.0
"""Seconds to wait for the ranks' exit. They are killed after a second, so this only bounds a defect."""


class GroupEnded(RuntimeError):
    """The group was closed or failed before the work was done; the message has the reason."""


class LocalGroup:
    """Ranks, scheduler and engine of the server without HTTP. The ranks end on `close` or with this process."""

    def __init__(self, settings: ServeSettings, rank_command: Sequence[str] = RANK_COMMAND) -> None:
        """Returns when every rank is ready. Raises ModelError when the first start fails."""
        self.backend: LocalBackend
        self._settings = settings
        self._command = rank_command
        self._ready: Future[None] = Future()
        self._why = "the engine was closed"
        self._is_ending = False
        self._ending = threading.Lock()
        """Held while work starts and while the group closes, so that no work starts after the close."""
        self._loop = asyncio.new_event_loop()
        self._leave = asyncio.Event()
        self._thread = threading.Thread(target=self._live, name="phalanx engine", daemon=True)
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether the group was closed or has failed."""
        return not self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of the coroutine, run on the group's event loop; an interrupt cancels it. Raises GroupEnded."""
        with self._ending:
            if self._is_ending:
                work.close()
                raise GroupEnded(self._why)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise GroupEnded(self._why) from error
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the ranks and the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._leave.set)
            self._thread.join(CLOSE_S)

    def _live(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._why = f"the engine ended: {error}"
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            with self._ending:
                self._is_ending = True
            self._loop.run_until_complete(_end_others())
            self._loop.close()

    async def _serve(self) -> None:
        """Runs the group until `close`."""
        settings, stop = self._settings, threading.Event()
        client = EngineClient(EngineMetrics(CollectorRegistry(), settings.model.served_names[0], RequestTotals()))
        self.backend = LocalBackend(client)
        client.subscribe(lambda: self._changed(client))
        place = PodPlace(
            pod=0,
            num_pods=1,
            leader_host=settings.group.leader_host,
            port=settings.group.master_port,
            token=secrets.token_hex(32),
        )
        supervisor = asyncio.create_task(LeaderSupervisor(place, make_parts(settings, stop, self._command), client).run())
        leave = asyncio.create_task(self._leave.wait())
        try:
            await asyncio.wait([supervisor, leave], return_when=asyncio.FIRST_COMPLETED)
            if supervisor.done() and (error := supervisor.exception()) is not None:
                self._why = f"the engine ended: {error}"
                raise error
        finally:
            stop.set()
            client.refuse(self._why)
            supervisor.cancel()
            leave.cancel()
            await asyncio.gather(supervisor, leave, return_exceptions=True)
            client.close()

    def _changed(self, client: EngineClient) -> None:
        """Completes the first start or fails it; later losses are handled by the supervisor."""
        state = client.state()
        if self._ready.done():
            return
        if state.serving:
            self._ready.set_result(None)
        elif state.incarnation > 1:
            self._ready.set_exception(ModelError(state.reason))


async def _end_others() -> None:
    """Cancels every other task of the running loop and waits for it, so that no caller of `run` waits forever."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
