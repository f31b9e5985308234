"""kopf's part: it watches the InferenceService objects and wakes their keys. It writes nothing, not even an annotation."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import kopf

from phalanx_api import inference_service as api
from phalanx_operator.store import Key


def registry(wake: Callable[[Key], None]) -> kopf.OperatorRegistry:
    """Handlers that wake a service when anything about it changes."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.startup(registry=handlers)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.watching.server_timeout = 300
        settings.watching.connect_timeout = 30
        settings.networking.request_timeout = 60

    @kopf.on.event(api.GROUP, api.VERSION, api.PLURAL, registry=handlers)
    async def changed(namespace: str | None, name: str, **_: Any) -> None:  # kopf would run another in a thread
        wake((namespace or "", name))

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> Mapping[str, Any] | None:
        found: Any = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
        return found  # type: ignore[no-any-return]

    return handlers


def quiet() -> None:
    """kopf logs each event of each object; we log what we do about it."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
