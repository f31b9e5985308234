"""kopf's part: it watches the InferenceService objects and wakes their keys. It writes nothing, not even an annotation."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import kopf

from phalanx_api.spec import inference_service as api
from phalanx_operator.kube.store import Key
from phalanx_operator.observe.service_cache import Known


class NoDiffs(kopf.DiffBaseStorage):
    """Nothing is compared with what was handled last: kopf would copy every object at every event for it."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """See DiffBaseStorage."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """See DiffBaseStorage."""
        return None

    def store(self, **_: Any) -> None:
        """See DiffBaseStorage."""


def registry(wake: Callable[[Key], None], services: Known) -> kopf.OperatorRegistry:
    """Handlers that wake a service when it is new, its spec changes, or it is deleted. That its status changed wakes nobody: we
    wrote it, and a look that writes a status and nothing else would find nothing to do if it came again. `services` hears all."""
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
    """kopf logs each event of each object; we log what we do about it."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
