"""Client of the engine, on one event loop. No call blocks.

Each incarnation has its own socket. Its end drops all open requests without calls to their sinks.
"""

import hashlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from phalanx_api import moves, wire
from phalanx_frontend.backend import BackendError
from phalanx_frontend.images.budget import MAX_BYTES
from phalanx_frontend.limits import has_room
from phalanx_runtime.engine.adapters.relay import AdapterRelay
from phalanx_runtime.engine.channel import EngineSocket
from phalanx_runtime.engine.load_feed import EngineObserver, LoadFeed
from phalanx_runtime.engine.move_relay import MoveRelay
from phalanx_runtime.engine.open_requests import EngineMeter, OpenRequests, RequestSink, image_bytes

log = logging.getLogger(__name__)

RESTART_RETRY_S = 2.0
"""Retry-After while ranks load."""
MAX_IMAGE_BYTES = MAX_BYTES
"""Of the pixels of all open requests, which tenants share as in one API server."""


class _ServingState:
    def __init__(self) -> None:
        self.current = wire.State(serving=False, incarnation=0, reason="starting")
        self.stop_reason: str | None = None
        self.deaths, self.last_death = 0, ""
        self.devices: list[wire.DeviceProblem] = []
        self.power = wire.NO_POWER
        self.adapters: wire.AdapterSlots | None = None
        self._is_final = False
        self._subscribers: list[Callable[[], None]] = []

    @property
    def may_serve(self) -> bool:
        return self.stop_reason is None and not self._is_final

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        self._subscribers.append(changed)
        return lambda: self._subscribers.remove(changed)

    def change(self, state: wire.State) -> None:
        state = msgspec.structs.replace(
            state, deaths=self.deaths, death=self.last_death, devices=self.devices, power=self.power, adapters=self.adapters
        )
        if state == self.current or (self._is_final and not self.current.serving):
            return
        self.current = state
        self.notify()

    def notify(self) -> None:
        """Calls the subscribers."""
        for changed in list(self._subscribers):
            changed()

    def pause(self, reason: str) -> None:
        now = self.current
        self.change(wire.State(serving=False, incarnation=now.incarnation, reason=reason, draining=True, served=now.served))

    def make_final(self) -> None:
        """Ignores changes once the group does not serve."""
        self._is_final = True


class EngineClient:
    """Connects sinks with the engine. Implements `EngineGateway`."""

    def __init__(self, meter: EngineMeter, socket: EngineSocket, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket = socket
        self._requests = OpenRequests(meter, clock)
        self._feed = LoadFeed(meter)
        self._serving = _ServingState()
        self._handles = itertools.count(1)
        self._assets: wire.Assets | None = None
        self._shown_assets: wire.Assets | None = None
        self._files_hash: hashlib._Hash | None = None  # of the files of `_assets`, once adapters need it
        """With the adapters; made when first needed."""
        self.moves = MoveRelay(self._send_if_open, lambda handle: self._drop([handle], "moved"))
        self.adapters = AdapterRelay(self._send_if_open, self._adapters_changed, self._check_serving)

    def state(self) -> wire.State:
        """Whether the group serves."""
        return self._serving.current

    @property
    def stop_reason(self) -> str | None:
        """Reason that no further incarnation follows, if so."""
        return self._serving.stop_reason

    @property
    def open_handles(self) -> tuple[int, ...]:
        """Handles of the open requests."""
        return self._requests.handles

    def has(self, handle: int) -> bool:
        """Whether a request is open."""
        return handle in self._requests

    @property
    def is_busy(self) -> bool:
        """Whether any request is open."""
        return bool(self._requests.handles)

    @property
    def has_lone_request(self) -> bool:
        """See `OpenRequests`."""
        return self._requests.has_lone_request

    def load(self) -> wire.Load:
        """Latest load report."""
        return self._feed.load

    def pages(self) -> wire.PageChanges:
        """Page keys."""
        return self._feed.pages.snapshot()

    def assets(self) -> wire.Assets:
        """Model assets. Raises BackendError 503 before an incarnation serves."""
        if self._assets is None:
            raise BackendError(503, "model_loading", f"the model is not loaded yet: {self.state().reason}", RESTART_RETRY_S)
        adapters = self.adapters.adapters
        if self._shown_assets is None:
            self._shown_assets = self._with_adapters(self._assets, adapters) if adapters else self._assets
        return self._shown_assets

    def _with_adapters(self, assets: wire.Assets, adapters: Sequence[wire.Adapter]) -> wire.Assets:
        if self._files_hash is None:
            self._files_hash = wire.hash_files(assets.files)
        return wire.with_adapters(assets, adapters, self._files_hash)

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Subscribes to `state`."""
        return self._serving.subscribe(changed)

    def observe(self, observer: EngineObserver) -> Callable[[], None]:
        """Subscribes to load and pages."""
        return self._feed.subscribe(observer)

    # Incarnations

    def bind(self, endpoint: str) -> None:
        """Opens the socket of a new incarnation, before its rank 0 starts."""
        self._socket.close()
        if self._serving.may_serve:
            self._socket.bind(endpoint, self.handle_message)

    def serve(self, assets: wire.Assets, served: wire.Served | None = None) -> None:
        """Accepts requests: every rank is ready."""
        if self._serving.may_serve:
            self._assets, self._shown_assets, self._files_hash = assets, None, None
            self.adapters.restore()  # before the subscribers send requests
            self._serving.change(wire.State(serving=True, incarnation=self.state().incarnation, served=served))
            self._socket.drain()

    def end_incarnation(self, next_incarnation: int, reason: str, is_outside: bool = False) -> None:
        """Drops all requests. `is_outside`: not caused by a request."""
        cause: wire.EndCause = "outside" if is_outside else "alone" if self.has_lone_request else ""
        self._socket.close()
        self.adapters.reset(reason)
        self._requests.end(self._requests.handles, "error")
        self.moves.clear()
        self._feed.reset()
        self._serving.change(wire.State(serving=False, incarnation=next_incarnation, reason=reason, cause=cause))

    def set_deaths(self, deaths: int, last_death: str) -> None:
        """Sets the deaths to report."""
        self._serving.deaths, self._serving.last_death = deaths, last_death

    def set_devices(self, problems: Iterable[wire.DeviceProblem], power: wire.DevicePower = wire.NO_POWER) -> None:
        """Reports the present problems of the group's devices, and their power."""
        serving, devices = self._serving, list(problems)
        if (devices, power) != (serving.devices, serving.power):
            serving.devices, serving.power = devices, power
            serving.change(self.state())

    def set_energy(self, total_j: float | None) -> None:
        """Sets the joules that the group's devices have used; none if they do not count them."""
        self._feed.set_energy(total_j)

    def set_adapters(self, slots: wire.AdapterSlots) -> None:
        """Reports declared adapters."""
        self._serving.adapters = slots
        self._serving.change(self.state())

    @property
    def used_adapters(self) -> Counter[wire.Adapter]:
        """Number of open requests of each adapter, with those that moves will bring."""
        return self._requests.adapters + self.moves.adapters

    def set_reason(self, next_incarnation: int, reason: str) -> None:
        """Updates the reason for not serving."""
        self._serving.change(wire.State(serving=False, incarnation=next_incarnation, reason=reason))

    def pause(self, reason: str) -> None:
        """Accepts no more requests in this incarnation; running ones continue."""
        if self._serving.stop_reason is None:
            self._serving.pause(reason)

    def drain(self, reason: str) -> None:
        """As `pause`, and no other incarnation follows."""
        self._serving.stop_reason = reason
        self._serving.pause(reason)

    def stop(self, reason: str) -> None:
        """Ends all requests: the process is stopping."""
        self._serving.stop_reason = reason
        self.end_incarnation(self.state().incarnation, reason, is_outside=True)
        self._serving.make_final()

    def close(self) -> None:
        """Closes permanently."""
        self._serving.make_final()
        self._requests.clear()
        self._socket.terminate()

    # Requests

    def submit(self, request: wire.Request, sink: RequestSink, move: str = "") -> int:
        """Submits a request and returns its engine handle; see `EngineGateway`.

        Raises BackendError 503 while the group does not serve, 429 while open requests hold all memory for images.
        """
        self._check_serving()
        self._check_images(request)
        handle = next(self._handles)
        self._send(wire.Submit(handle, request, move))  # an encoding error leaves no state
        if move:
            self.moves.unregister(move)
        has_adapter = request.adapter is not None and self.adapters.used(request.adapter)
        self._requests.add(handle, request, sink, request.adapter if has_adapter else None)
        return handle

    def _check_images(self, request: wire.Request) -> None:
        """Bounds the pixels of all routers together: each of them admits as many. A stream that has started may go on here."""
        was_started = request.epoch > 0 or request.delivered
        if not request.images or was_started:
            return
        held, of_tenant = self._requests.image_bytes(), self._requests.image_bytes(request.tenant) if request.tenant else None
        if not has_room(image_bytes(request), held, of_tenant, MAX_IMAGE_BYTES):
            message = f"the images of the group's open requests have {held >> 20} of {MAX_IMAGE_BYTES >> 20} MiB"
            message += f", {of_tenant >> 20} of this tenant" if of_tenant is not None else ""
            raise BackendError(429, "image_memory_full", message, RESTART_RETRY_S)

    def _check_serving(self) -> None:
        reason = self.state().reason
        if self._serving.stop_reason is not None:
            raise BackendError(503, "draining", f"the group takes no more requests: {reason}", RESTART_RETRY_S)
        if not self.state().serving:
            raise BackendError(503, "group_restarting", f"the group does not serve: {reason}", RESTART_RETRY_S)

    def reassign(self, handles: Iterable[int], sink: RequestSink) -> None:
        """Assigns requests to another sink."""
        self._requests.reassign(handles, sink)

    def abort(self, handles: list[int]) -> None:
        """Aborts requests."""
        self._drop(handles, "abort")

    def _drop(self, handles: list[int], reason: str) -> None:
        if ended := self._requests.end(handles, reason):
            self._send(wire.Abort(ended))

    def _adapters_changed(self) -> None:
        self._shown_assets = None
        self._serving.notify()

    # Frames

    def _send(self, frame: wire.ToEngine) -> None:
        self._socket.send(wire.encode(frame))

    def _send_if_open(self, frame: wire.ToEngine) -> None:
        """Move frames may arrive between incarnations."""
        if self._socket.is_open:
            self._send(frame)

    def handle_message(self, message: bytes) -> None:
        """Handles one message of the engine."""
        try:
            frame = wire.decode_from_engine(message)
        except msgspec.DecodeError as error:
            log.error("frame of the engine cannot be read", extra={"why": str(error)})
            return
        match frame:
            case wire.Tokens():
                self._requests.route(frame)
            case wire.Refused():
                self._requests.refuse(frame)
            case moves.Prepared() | moves.Frozen() | moves.Arrived() | moves.MoveFailed():
                self.moves.deliver(frame)
            case wire.AdapterLoaded():
                self.adapters.deliver(frame)
            case moves.RescueRequest():
                self.moves.deliver_rescue(frame)
            case wire.Load():
                self._feed.update_load(frame)
            case wire.PageChanges():
                self._feed.update_pages(frame)
