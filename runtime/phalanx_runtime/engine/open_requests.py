"""Open requests of the HTTP process: token routing, latency measurements."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from phalanx_api import wire


class RequestSink(Protocol):
    """Receives frames about its requests, with engine handles, on the event loop; never blocks."""

    def tokens(self, frame: wire.Tokens) -> None:
        """All tokens of one step for this sink, which owns the frame."""
        ...

    def refused(self, frame: wire.Refused) -> None:
        """A request ended without finishing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """Measurements of a request."""

    reason: str
    """stop, length, abort, moved (to another group), or error (refused, or engine lost)."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    max_tokens: int
    latency_s: float
    decode_s: float
    """From the first token to the last; 0 for a single token."""


class EngineMeter(Protocol):
    """Receives measurements."""

    def load(self, load: wire.Load) -> None:
        """A load report; empty at the engine's end."""
        ...

    def step(self, num_tokens: int) -> None:
        """A step produced `num_tokens` tokens."""
        ...

    def first_token(self, prompt_tokens: int, wait_s: float) -> None:
        """First token of a request, `wait_s` after submission."""
        ...

    def queued(self, wait_s: float) -> None:
        """First step of a request, `wait_s` after its arrival at the engine."""
        ...

    def next_token(self, gap_s: float) -> None:
        """Another token of a request, `gap_s` after the previous one."""
        ...

    def embedded(self, prompt_tokens: int) -> None:
        """A request got its vector."""
        ...

    def ended(self, end: EndedRequest) -> None:
        """A request ended."""
        ...


@dataclass(slots=True, kw_only=True)
class _OpenRequest:
    sink: RequestSink
    prompt_tokens: int
    max_tokens: int
    is_alone: bool
    submitted: float
    adapter: wire.Adapter | None
    tenant: str
    image_bytes: int
    """Of pixels, which rank 0 holds until the request ends."""
    first_token: float | None = None
    last_token: float = 0.0
    num_tokens: int = 0
    cached_tokens: int = 0

    def end(self, reason: str, now: float) -> EndedRequest:
        return EndedRequest(
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.num_tokens,
            max_tokens=self.max_tokens,
            latency_s=now - self.submitted,
            decode_s=0.0 if self.first_token is None else self.last_token - self.first_token,
        )


def image_bytes(request: wire.Request) -> int:
    """Returns the bytes of a request's pixels."""
    return sum(len(image.pixels) for image in request.images)


class _StepFrames:
    def __init__(self) -> None:
        self._by_sink: dict[int, tuple[RequestSink, wire.Tokens]] = {}

    def of(self, sink: RequestSink) -> wire.Tokens:
        entry = self._by_sink.get(id(sink))
        if entry is None:
            entry = self._by_sink[id(sink)] = (sink, wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[]))
        return entry[1]

    def send(self) -> None:
        for sink, frame in self._by_sink.values():
            sink.tokens(frame)


class OpenRequests:
    """Requests by engine handle; unknown handles are ignored."""

    def __init__(self, meter: EngineMeter, clock: Callable[[], float]) -> None:
        self._meter = meter
        self._clock = clock
        self._requests: dict[int, _OpenRequest] = {}

    @property
    def handles(self) -> tuple[int, ...]:
        """All handles."""
        return tuple(self._requests)

    def __contains__(self, handle: int) -> bool:
        return handle in self._requests

    @property
    def has_lone_request(self) -> bool:
        """Whether a request is computed alone because groups died while they computed it."""
        return any(request.is_alone for request in self._requests.values())

    @property
    def adapters(self) -> Counter[wire.Adapter]:
        """Number of requests of each adapter."""
        return Counter(request.adapter for request in self._requests.values() if request.adapter is not None)

    def image_bytes(self, tenant: str | None = None) -> int:
        """Returns the bytes of the pixels of all requests, or of a tenant's."""
        return sum(request.image_bytes for request in self._requests.values() if tenant in (None, request.tenant))

    def add(self, handle: int, request: wire.Request, sink: RequestSink, adapter: wire.Adapter | None) -> None:
        """Adds a request. `adapter`: whose slot it has."""
        self._requests[handle] = _OpenRequest(
            sink=sink,
            prompt_tokens=len(request.prompt),
            max_tokens=request.sampling.max_tokens,
            is_alone=request.alone,
            submitted=self._clock(),
            adapter=adapter,
            tenant=request.tenant,
            image_bytes=image_bytes(request),
        )

    def reassign(self, handles: Iterable[int], sink: RequestSink) -> None:
        """Assigns requests to another sink."""
        for handle in handles:
            if (request := self._requests.get(handle)) is not None:
                request.sink = sink

    def end(self, handles: Iterable[int], reason: str) -> list[int]:
        """Ends requests without calls to their sinks; returns the open ones."""
        ended = []
        for handle in handles:
            request = self._requests.pop(handle, None)
            if request is not None:
                ended.append(handle)
                self._meter.ended(request.end(reason, self._clock()))
        return ended

    def clear(self) -> None:
        """Drops all requests unmeasured."""
        self._requests.clear()

    def refuse(self, frame: wire.Refused) -> None:
        """Ends a request with a refusal."""
        request = self._requests.pop(frame.handle, None)
        if request is not None:
            self._meter.ended(request.end("error", self._clock()))
            request.sink.refused(frame)

    def route(self, frame: wire.Tokens) -> None:
        """Measures the tokens of one step and sends each sink its part."""
        now, frames = self._clock(), _StepFrames()
        self._route_tokens(frame, frames, now)
        self._route_details(frame, frames)
        for end in frame.finished:
            request = self._requests.pop(end.handle, None)
            if request is None:
                continue
            frames.of(request.sink).finished.append(end)
            request.cached_tokens = end.cached_tokens
            if end.vector:
                self._meter.embedded(request.prompt_tokens)
            self._meter.ended(request.end(end.reason, now))
        for wait_s in frame.queue_times_s:
            self._meter.queued(wait_s)
        self._meter.step(len(frame.handles))
        frames.send()

    def _route_tokens(self, frame: wire.Tokens, frames: _StepFrames, now: float) -> None:
        # Tokens of one step share the time since the previous token.
        num_tokens, gaps_s = Counter(frame.handles), dict[int, float]()
        for handle, epoch, index, token in zip(frame.handles, frame.epochs, frame.indices, frame.tokens, strict=True):
            request = self._requests.get(handle)
            if request is None:
                continue
            part = frames.of(request.sink)
            part.handles.append(handle)
            part.epochs.append(epoch)
            part.indices.append(index)
            part.tokens.append(token)
            if request.first_token is None:
                request.first_token = now
                self._meter.first_token(request.prompt_tokens, now - request.submitted)
            else:
                self._meter.next_token(gaps_s.setdefault(handle, (now - request.last_token) / num_tokens[handle]))
            request.last_token = now
            request.num_tokens += 1

    def _route_details(self, frame: wire.Tokens, frames: _StepFrames) -> None:
        for cached in frame.cached:
            request = self._requests.get(cached.handle)
            if request is not None:
                request.cached_tokens = max(request.cached_tokens, cached.cached_tokens)
                frames.of(request.sink).cached.append(cached)
        if frame.details:
            for handle, detail in zip(frame.handles, frame.details, strict=True):
                request = self._requests.get(handle)
                if request is not None:
                    frames.of(request.sink).details.append(detail)
        for details in frame.prompt_details:
            request = self._requests.get(details.handle)
            if request is not None:
                frames.of(request.sink).prompt_details.append(details)
