"""Shared state of the routes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx_api import wire
from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.backend import Backend, BackendError
from phalanx_frontend.ids import random_seed
from phalanx_frontend.limits import Limits
from phalanx_frontend.metrics import ApiMetrics, Clock
from phalanx_frontend.openai.served_model import ModelCache, ServedModel, usable_names
from phalanx_frontend.stream.response_cache import NO_RESPONSE_CACHE, CacheQuery, CacheUse, ResponseCache

MAX_SERVED = 64
"""Assets whose first use is known: each change of the adapters makes others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """Shared state of the routes."""

    backend: Backend
    metrics: ApiMetrics
    limits: Limits
    models: ModelCache = field(default_factory=ModelCache)
    seconds: Clock = time.perf_counter  # monotonic
    unix_s: Clock = time.time  # time of day
    random_seed: Callable[[], int] = random_seed
    cache: ResponseCache = NO_RESPONSE_CACHE
    keep_alive_s: float = 5.0  # interval of comments while a stream waits for a model

    _first_served_s: dict[str, float] = field(default_factory=dict)

    def assets(self) -> wire.Assets:
        """Returns the current assets. Raises BackendError 503."""
        assets = self.backend.assets()
        if next(reversed(self._first_served_s), None) != assets.content_hash:
            self._assets_changed(assets)
        return assets

    def _assets_changed(self, assets: wire.Assets) -> None:
        known, hash = self._first_served_s, assets.content_hash
        known[hash] = known.pop(hash) if hash in known else self.unix_s()  # the present ones are last
        if len(known) > MAX_SERVED:
            del known[next(iter(known))]
        self.metrics.retain_models({*assets.served_names, *(adapter.name for adapter in assets.adapters)})

    def first_served_s(self, assets: wire.Assets) -> float:
        """Returns the Unix time of the first use of `assets`."""
        first_s = self._first_served_s.get(assets.content_hash)
        return self.unix_s() if first_s is None else first_s

    def lacks_model(self, requested: str | None) -> bool:
        """Whether no model is known yet, or no group has loaded the adapter of this name."""
        try:
            assets = self.backend.assets()
        except BackendError:
            return True
        return any(adapter.name == requested and not adapter.content_hash for adapter in assets.adapters)

    async def model(self, requested: str | None = None, caller: Caller | None = None) -> ServedModel:
        """Returns the current model, after waiting if that can help. Raises BackendError.

        `caller`: of a request that computes with the `requested` name, or with its first one, whose adapter must be loaded.
        """
        await self.backend.wait_for_assets()
        names = usable_names(self.backend.assets(), caller) if caller is not None else []
        if requested in names or (requested is None and names):
            await self.backend.wait_for_assets(requested or names[0])
        return await self.models.get(self.assets())

    def cache_use(self, query: CacheQuery | None) -> CacheUse | None:
        """Returns the use of the response cache by a request, if it may be stored there."""
        return None if query is None or not self.cache.is_enabled else CacheUse(self.cache, query)

    async def warm(self) -> None:
        """Loads the model, if known."""
        try:
            assets = self.assets()
        except BackendError:
            return
        await self.models.get(assets)
