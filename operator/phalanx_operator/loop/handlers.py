"""kopf handlers that watch InferenceServices and wake their keys."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import kopf

from phalanx_api.spec import inference_service as api
from phalanx_operator.kube.store import Key
from phalanx_operator.observe.service_cache import ServiceCache


class NoDiffs(kopf.DiffBaseStorage):
    """Disables kopf's diffs, which copy every object at every event."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """See DiffBaseStorage."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """See DiffBaseStorage."""
        return None

    def store(self, **_: Any) -> None:
        """See DiffBaseStorage."""


def registry(wake: Callable[[Key], None], services: ServiceCache, *, scans: bool = True) -> kopf.OperatorRegistry:
    """Returns the handlers. Creation, deletion and changes of the spec wake a service.

    scans: follows CRDs and namespaces. With a list of namespaces the operator may not list them, which kopf tries for a minute.
    """
    handlers = kopf.OperatorRegistry()
    generations: dict[Key, tuple[Any, ...]] = {}

    @kopf.on.startup(registry=handlers)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.watching.server_timeout = 300
        settings.watching.connect_timeout = 30
        settings.networking.request_timeout = 60
        settings.persistence.diffbase_storage = NoDiffs()
        settings.scanning.disabled = not scans

    @kopf.on.event(api.GROUP, api.VERSION, api.PLURAL, registry=handlers)
    async def changed(namespace: str | None, name: str, type: str | None, event: Any, meta: Mapping[str, Any], **_: Any) -> None:
        key = namespace or "", name
        former = generations.pop(key, None)
        generation = meta.get("uid"), meta.get("generation"), meta.get("deletionTimestamp")
        if type == "DELETED":
            services.forget(key)
        else:
            services.store(event["object"])
            generations[key] = generation
        if type == "DELETED" or generation != former:
            wake(key)

    @kopf.on.login(registry=handlers)
    def log_in(**kwargs: Any) -> Mapping[str, Any] | None:
        login: Any = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
        return login  # type: ignore[no-any-return]

    return handlers


def silence_events() -> None:
    """Silences kopf's log of events."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
