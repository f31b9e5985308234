"""kopf handlers that watch InferenceServices and wake their keys. They write nothing, not even annotations."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import kopf

from phalanx_api.spec import inference_service as api
from phalanx_operator.kube.store import Key
from phalanx_operator.observe.service_cache import ServiceCache


class NoDiffs(kopf.DiffBaseStorage):
    """Disables kopf's diffs, which would copy every object at every event."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """See DiffBaseStorage."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """See DiffBaseStorage."""
        return None

    def store(self, **_: Any) -> None:
        """See DiffBaseStorage."""


def registry(wake: Callable[[Key], None], services: ServiceCache) -> kopf.OperatorRegistry:
    """Returns the handlers that wake a service when it is created, deleted, or its spec changes. Status changes wake nothing: the
    operator wrote them. `services` receives every event."""
    handlers = kopf.OperatorRegistry()
    known: dict[Key, tuple[Any, ...]] = {}

    @kopf.on.startup(registry=handlers)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.watching.server_timeout = 300
        settings.watching.connect_timeout = 30
        settings.networking.request_timeout = 60
        settings.persistence.diffbase_storage = NoDiffs()

    @kopf.on.event(api.GROUP, api.VERSION, api.PLURAL, registry=handlers)
    async def changed(namespace: str | None, name: str, type: str | None, event: Any, meta: Mapping[str, Any], **_: Any) -> None:
        key, former = (namespace or "", name), known.pop((namespace or "", name), None)
        now = meta.get("uid"), meta.get("generation"), meta.get("deletionTimestamp")
        if type == "DELETED":
            services.forget(key)
        else:
            services.hear(event["object"])
            known[key] = now
        if type == "DELETED" or now != former:
            wake(key)

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> Mapping[str, Any] | None:
        found: Any = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
        return found  # type: ignore[no-any-return]

    return handlers


def quiet() -> None:
    """Silences kopf's log of each event; the operator logs its own actions."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
