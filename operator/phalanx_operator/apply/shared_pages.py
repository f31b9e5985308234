"""Keeps each service's part of its namespace's Secret for cached pages: present with `spec.rebalancing.sharePages`, else absent.

Server-side apply with a field manager per service merges the parts, so no service reads those of others.
"""

from collections.abc import Callable

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.apply.owned import REAPPLY_S
from phalanx_operator.kube.client import SECRETS, Gone, KubeClient
from phalanx_operator.kube.store import Key
from phalanx_operator.render import objects as names
from phalanx_operator.render import services


class SharedPages:
    """Remembers what was applied, so that services which share no pages cost one read per start of the operator."""

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
