"""Keeps the Secrets with tokens: the service's own, rotated when `spec.security.tokenRotationId` changes, and its namespace's.

The service's Secret has one token per line: the first is sent, all are accepted (`phalanx_frontend.auth.service_token`). Each
step of a rotation waits for `SPREAD`, so all pods have read the one before:

    accept    former, new      all accept the new token
    send      new, former      all send it; the operator and open connections may still have the former one
    done      new
"""

import base64
import datetime
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.apply.issuing import SPREAD
from phalanx_operator.apply.owned import REAPPLY_S, check_owner
from phalanx_operator.kube.client import SECRETS, Conflict, Gone, Json, KubeClient, Retry
from phalanx_operator.kube.store import Key
from phalanx_operator.logs import audit
from phalanx_operator.render import objects as names
from phalanx_operator.render import services

log = logging.getLogger(__name__)

Stage = Literal["done", "accept", "send"]


@dataclass(frozen=True, slots=True)
class TokenState:
    """Content of the Secret."""

    tokens: tuple[str, ...]
    """In the order of the file."""
    rotation_id: str = ""
    """`spec.security.tokenRotationId` of the last rotation."""
    stage: Stage = "done"
    since: datetime.datetime | None = None
    """Start of the stage."""


def next_state(state: TokenState, wanted_id: str, now: datetime.datetime, draw: Callable[[], str]) -> TokenState | None:
    """Returns the state that is due; null if none is. A rotation ends before another one starts."""
    match state.stage:
        case _ if not state.tokens:
            return TokenState((draw(),), wanted_id)
        case "accept" | "send" if state.since is None:
            return replace(state, since=now)
        case "done" if wanted_id not in ("", state.rotation_id):
            return TokenState((state.tokens[0], draw()), wanted_id, "accept", now)
        case "accept" if _is_spread(state, now):
            return replace(state, tokens=state.tokens[::-1], stage="send", since=now)
        case "send" if _is_spread(state, now):
            return TokenState(state.tokens[:1], state.rotation_id)
    return None


def _is_spread(state: TokenState, now: datetime.datetime) -> bool:
    return state.since is not None and now - state.since >= SPREAD


@dataclass(frozen=True, slots=True)
class _Kept:
    uid: str
    wanted_id: str
    token: str
    due_s: float


class ServiceTokens:
    """Creates and rotates. Each Secret has one writer, the leading operator."""

    def __init__(
        self,
        client: KubeClient,
        clock: Callable[[], float],
        draw: Callable[[], str],
    ) -> None:
        self._client = client
        self._clock = clock
        self._draw = draw
        self._kept: dict[Key, _Kept] = {}

    def forget(self, key: Key) -> None:
        """Drops a deleted service."""
        self._kept.pop(key, None)

    def due_at_s(self, key: Key) -> float:
        """Returns when the Secret is read again."""
        return self._kept[key].due_s if key in self._kept else self._clock()

    async def keep(self, service: InferenceService, now: datetime.datetime, *, is_new: bool) -> str:
        """Returns the token to send. Creates the Secret, or makes the step of a rotation that is due.

        is_new: the service has no objects yet. Raises Rejected if another owner has the Secret, Retry, or another KubeError.
        """
        key, wanted_id = (service.namespace, service.name), service.spec.security.token_rotation_id
        kept = self._kept.get(key)
        if kept and (kept.uid, kept.wanted_id) == (service.uid, wanted_id) and self._clock() < kept.due_s:
            return kept.token
        stored = None if is_new and kept is None else await self._read(service)
        if stored is None:
            try:
                state = await self._create(service, kept.token if kept and kept.uid == service.uid else self._draw())
            except Conflict:
                if (stored := await self._read(service)) is None:
                    raise  # deleted between the two calls
        if stored is not None:
            state = await self._advance(service, stored, now)
        left_s = REAPPLY_S if state.since is None else max(0.0, (state.since + SPREAD - now).total_seconds())
        self._kept[key] = _Kept(service.uid, wanted_id, state.tokens[0], self._clock() + min(left_s, REAPPLY_S))
        return state.tokens[0]

    async def _read(self, service: InferenceService) -> Json | None:
        name = names.token_secret(service.name)
        try:
            stored = await self._client.get(SECRETS, service.namespace, name)
        except Gone:
            return None
        check_owner(service, stored["metadata"], f"Secret {name}")
        return stored

    async def _create(self, service: InferenceService, token: str) -> TokenState:
        """token: the one before, if the Secret was deleted, because pods still have it."""
        state = TokenState((token,), service.spec.security.token_rotation_id)
        annotations = _annotations(state) if state.rotation_id else {}
        await self._client.create(SECRETS, services.token_secret(service, state.tokens[0], annotations))
        log.info("token created", extra={"service": f"{service.namespace}/{service.name}", "why": "the service had no token"})
        return state

    async def _advance(self, service: InferenceService, stored: Json, now: datetime.datetime) -> TokenState:
        state = read_state(stored)
        following = next_state(state, service.spec.security.token_rotation_id, now, self._draw)
        if following is None:
            return state
        metadata = {"resourceVersion": stored["metadata"]["resourceVersion"], "annotations": _annotations(following)}
        text = base64.b64encode("\n".join(following.tokens).encode()).decode()
        patch = {"metadata": metadata, "data": {services.TOKEN_KEY: text}}
        try:
            await self._client.merge(SECRETS, service.namespace, names.token_secret(service.name), patch)
        except Conflict as error:
            raise Retry(f"Secret {names.token_secret(service.name)} changed meanwhile") from error
        why = f"{following.stage}: spec.security.tokenRotationId is {following.rotation_id!r}"
        audit("rotate", f"secrets/{names.token_secret(service.name)}", f"{service.namespace}/{service.name}", why)
        return following


def read_state(stored: Json) -> TokenState:
    """Returns the content of a Secret. Stages of unreadable annotations start again."""
    annotations = stored["metadata"].get("annotations") or {}
    stage, _, since = annotations.get(labels.TOKEN_STAGE, "done").partition(" ")
    tokens = services.read_tokens(stored)
    if stage not in get_args(Stage) or len(tokens) != (1 if stage == "done" else 2):
        stage = "done" if len(tokens) < 2 else "send"
    try:
        at = datetime.datetime.fromisoformat(since) if stage != "done" else None
        at = at if at is None or at.tzinfo else None
    except ValueError:
        at = None
    return TokenState(tokens, annotations.get(labels.TOKEN_ROTATION, ""), stage, at)


def _annotations(state: TokenState) -> dict[str, str]:
    since = "" if state.since is None else f" {state.since.isoformat()}"
    return {labels.TOKEN_ROTATION: state.rotation_id, labels.TOKEN_STAGE: f"{state.stage}{since}"}


class SharedPages:
    """Each service's part of its namespace's Secret for cached pages: present with `spec.rebalancing.sharePages`, else absent.

    Server-side apply with a field manager per service merges the parts, so no service reads those of others. Remembers what was
    applied, so that services which share no pages cost one read per start of the operator.
    """

    def __init__(self, client: KubeClient, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._kept: dict[Key, tuple[str, float]] = {}
        """The token in the part, empty without a part, and when."""

    def forget(self, key: Key) -> None:
        """Drops a deleted service."""
        self._kept.pop(key, None)

    async def keep(self, service: InferenceService, token: str, *, is_new: bool) -> None:
        """Applies or removes the part, if it is due or the service has another token. Raises KubeError."""
        key, is_wanted = (service.namespace, service.name), service.spec.rebalancing.share_pages
        kept_token, at_s = self._kept.get(key, (None, 0.0))
        if kept_token == (token if is_wanted else "") and (not is_wanted or self._clock() - at_s < REAPPLY_S):
            return
        if is_wanted:
            await self._apply(service, token)
        elif kept_token or (not is_new and await self._is_present(service)):
            await self._apply(service, "")
        self._kept[key] = token if is_wanted else "", self._clock()

    async def _is_present(self, service: InferenceService) -> bool:
        try:
            secret = await self._client.get(SECRETS, service.namespace, names.SHARED_PAGES)
        except Gone:
            return False
        return service.name in (secret.get("data") or {})

    async def _apply(self, service: InferenceService, token: str) -> None:
        await self._client.apply(SECRETS, services.shared_pages(service, token), manager=f"{labels.MANAGER}/{service.name}")
