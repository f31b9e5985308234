"""The caller of a request: its id, API key and permissions."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys, bearer_token
from phalanx_frontend.auth.audit import AuditEntry, outcome_of
from phalanx_frontend.auth.oidc import OidcSettings
from phalanx_frontend.errors import (
    CLASSIFY_PATH,
    MESSAGES_PATH,
    OTHER_PATHS,
    RERANK_PATH,
    RESPONSES_PATH,
    SCORE_PATH,
    ApiError,
    error_response,
    is_anthropic,
    with_challenge,
)
from phalanx_frontend.ids import STREAM_NAME_SEPARATOR, random_id
from phalanx_frontend.logs import TRACE_ID
from phalanx_frontend.tracing.tracer import RequestTrace, Tracer

log = logging.getLogger(__name__)

TRACED_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/generate",
        "/v1/batch",
        MESSAGES_PATH,
        RESPONSES_PATH,
        SCORE_PATH,
        RERANK_PATH,
        CLASSIFY_PATH,
        *OTHER_PATHS,
    }
)
OPEN_PATHS = frozenset({"/health", "/healthz", "/ping", "/readyz", "/metrics"})
"""Paths without authentication, for kubelets and scrapers."""
PRIORITIES = range(-(2**31), 2**31)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_SCOPE_KEY = "phalanx.caller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of one request."""

    request_id: str
    key: ApiKey | None = None
    has_keys: bool = False  # whether the server has keys
    has_random_id: bool = False  # `request_id` is 128 random bits of this server
    last_event_id: str = ""  # the header
    no_store: bool = False  # whether Cache-Control forbids to store the response
    trace: RequestTrace | None = None  # of a request that may be traced

    def stream_name(self, id: str) -> str:
        """Returns an unguessable stream name."""
        return id if self.has_random_id else random_id(id + STREAM_NAME_SEPARATOR)

    def tenant(self, tenant: str | None, user: str | None) -> str:
        """Returns the name of the key or token; without keys the body's `tenant` or `user`."""
        if self.has_keys:
            return self.key.name if self.key is not None else ""
        return tenant or user or ""

    def may_use(self, model: str) -> bool:
        """Returns whether the key allows requests to a model of this name."""
        models = self.key.models if self.key is not None else None
        return models is None or model in models

    def priority(self, requested: int | None) -> int:
        """Returns the priority; lower is more urgent. Raises ApiError 400 or 403."""
        bound = self.key.priority if self.key is not None else None
        if requested is None:
            return max(0, bound or 0)
        if requested not in PRIORITIES:
            raise ApiError(400, f"priority must be between {PRIORITIES[0]} and {PRIORITIES[-1]}", "priority")
        if bound is not None and requested < bound:
            message = f"this API key or token allows no priority below {bound}"
            self.audit_use(f"priority/{requested}", message)
            raise ApiError(403, message, "priority", "priority_not_allowed")
        return requested

    def audit_use(self, subject: str, why: str) -> None:
        """Writes the audit line of a use that the key does not allow."""
        caller = self.key.name if self.key is not None else ""
        AuditEntry(verb="use", caller=caller, request_id=self.request_id, subject=subject).write("refused", why)


def caller_of(request: Request) -> Caller:
    """Returns the caller."""
    caller: Caller = request.scope[_SCOPE_KEY]
    return caller


async def current_caller(request: Request) -> Caller:
    """Returns the caller, for FastAPI's Depends, which would run a function in a thread."""
    return caller_of(request)


def with_caller(scope: Scope, caller: Caller) -> Scope:
    """Returns the scope of a request of this process, which `CallerMiddleware` passes on as it is."""
    return {**scope, _SCOPE_KEY: caller}


class CallerMiddleware:
    """ASGI middleware that refuses requests without a valid key or token, and returns a request id, the client's if it is safe to
    log."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        tracer: Tracer | None = None,
        responded: Callable[[str, int], None] = lambda tenant, status: None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._tracer = tracer
        self._responded = responded  # with the tenant of the key and the status, for paths of the API

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request or returns 401."""
        if scope["type"] != "http" or _SCOPE_KEY in scope:
            await self._app(scope, receive, send)
            return
        start_s = time.perf_counter()
        headers = dict(scope["headers"])
        requested = safe_request_id(headers.get(b"x-request-id", b""))
        has_random_id, id = not requested, requested or random_id("")
        authorization = _authorization(headers)
        is_open = scope["path"] in OPEN_PATHS
        key, refusal = (None, None) if is_open else await authenticate(self._keys, authorization, time.time())
        status, trace = 0, None if refusal is not None else self._open_trace(scope, headers)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_id_headers(scope, id)]
                if trace is not None:
                    message["headers"].append((b"traceparent", trace.identity.traceparent().encode("ascii")))
            await send(message)

        scope[_SCOPE_KEY] = Caller(
            request_id=id,
            key=key,
            has_keys=bool(self._keys),
            has_random_id=has_random_id,
            last_event_id=headers.get(b"last-event-id", b"").decode("latin-1"),
            no_store=_forbids_storing(scope),
            trace=trace,
        )
        token = TRACE_ID.set(str if trace is None else lambda: trace.identity.trace_id)
        try:
            if refusal is not None:
                audit_refusal(refusal, key, id, scope["path"] if scope["path"] in TRACED_PATHS else "other")
                await error_response(refusal, scope)(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        finally:
            if not is_open:
                fields = {"request_id": id, "method": scope["method"], "path": _path(scope), "status": status}
                fields |= {"seconds": round(time.perf_counter() - start_s, 4), "api_key": key.name if key is not None else None}
                if trace is not None:
                    end_trace(trace, id, status)
                if status and self._keys and scope["path"] in TRACED_PATHS:
                    self._responded(key.name if key is not None else "", status)
                log.info("request ended", extra=fields)
            TRACE_ID.reset(token)

    def _open_trace(self, scope: Scope, headers: Mapping[bytes, bytes]) -> RequestTrace | None:
        if self._tracer is None or scope["path"] not in TRACED_PATHS:
            return None
        return self._tracer.open(headers.get(b"traceparent", b"").decode("latin-1"), scope["path"])


def _id_headers(scope: Scope, id: str) -> list[tuple[bytes, bytes]]:
    """Returns the headers with the id of a request; clients of Anthropic read `request-id`."""
    value = id.encode("ascii")
    return [(b"x-request-id", value), *([(b"request-id", value)] if is_anthropic(scope) else [])]


def _authorization(headers: Mapping[bytes, bytes]) -> bytes:
    """Returns the Authorization header; without a bearer key in it that of `x-api-key`, which clients of Anthropic send."""
    authorization, key = headers.get(b"authorization", b""), headers.get(b"x-api-key", b"")
    return b"Bearer " + key if key and bearer_token(authorization) is None else authorization


def safe_request_id(header: bytes) -> str:
    """Returns the client's request id if it is safe to log, else an empty string."""
    id = header.decode("latin-1")
    return id if _REQUEST_ID.fullmatch(id) else ""


def audit_refusal(refusal: ApiError, key: ApiKey | None, request_id: str, subject: str) -> None:
    """Writes the audit line of a refused key. `subject`: a path, never the client's text."""
    caller = key.name if key is not None else ""
    AuditEntry(verb="authenticate", caller=caller, request_id=request_id, subject=subject).write(
        outcome_of(refusal), refusal.message
    )


def end_trace(trace: RequestTrace, id: str, status: int) -> None:
    """Ends the span of a request. `status`: of the response; 0: none was sent."""
    trace.attributes |= {"phalanx.request_id": id, "http.request.method": "POST"}
    if status:
        trace.attributes["http.response.status_code"] = status
    if status >= 500 and not trace.error:
        trace.fail(f"HTTP {status}")
    trace.end()


def accepted_keys(keys: Iterable[ApiKey], oidc: OidcSettings | None = None) -> ApiKeys:
    """Returns the keys that an API server accepts, and the tokens of an issuer."""
    if oidc is None:
        return ApiKeys(keys)
    from phalanx_frontend.auth.tokens import IssuerTokens  # its libraries take 7 MiB and a second

    return ApiKeys(keys, IssuerTokens(oidc))


async def authenticate(keys: ApiKeys, authorization: bytes, unix_s: float) -> tuple[ApiKey | None, ApiError | None]:
    """Returns the key or token of a header, also an expired one, and why it is refused, in OpenAI's form.

    A refusal is a 401, or a 503 while no token can be verified. Without keys and an issuer nothing is refused.
    """
    token, key = bearer_token(authorization), keys.find(authorization)
    if not keys:
        return None, None
    if key is not None:
        return key, _expired_key(key, unix_s)
    if keys.tokens is not None and token is not None and token.count(b".") == 2:
        try:
            key = await keys.tokens.verify(token)
        except ApiError as refusal:
            return None, refusal
        return key, _expired_token(key, unix_s)
    if authorization:
        return None, with_challenge(ApiError(401, "Incorrect API key provided.", code="invalid_api_key"))
    message = "You didn't provide an API key: send Authorization: Bearer <key>."
    return None, ApiError(401, message, code="invalid_api_key")


def _expired_key(key: ApiKey, unix_s: float) -> ApiError | None:
    if key.expires is None or unix_s < key.expires.timestamp():
        return None
    message = f"This API key expired at {key.expires.isoformat(timespec='seconds')}: use another key of {key.name}."
    return with_challenge(ApiError(401, message, code="api_key_expired"))


def _expired_token(key: ApiKey, unix_s: float) -> ApiError | None:
    if key.expires is None or unix_s < key.expires.timestamp():
        return None
    return with_challenge(ApiError(401, "The token has expired: get another one from its issuer.", code="token_expired"))


def _forbids_storing(scope: Scope) -> bool:
    """Returns whether a Cache-Control header, which may be repeated, has `no-store`."""
    cache_control = b",".join(value for name, value in scope["headers"] if name == b"cache-control")
    return b"no-store" in map(bytes.strip, cache_control.lower().split(b","))


def _path(scope: Scope) -> str:
    """Returns the matched route: a client's path may contain anything."""
    return str(getattr(scope.get("route"), "path", "unknown"))
