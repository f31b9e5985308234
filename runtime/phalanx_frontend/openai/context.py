"""Shared state of the API server's routes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx_api import wire
from phalanx_frontend.backend import Backend, BackendError
from phalanx_frontend.ids import draw_seed
from phalanx_frontend.limits import Limits
from phalanx_frontend.metrics import ApiMetrics, Clock
from phalanx_frontend.openai.served_model import ModelCache, ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """Shared state of the routes."""

    backend: Backend
    metrics: ApiMetrics
    limits: Limits
    models: ModelCache = field(default_factory=ModelCache)
    seconds: Clock = time.perf_counter  # monotonic clock
    unix_s: Clock = time.time  # time of day
    draw_seed: Callable[[], int] = draw_seed
    keep_alive_s: float = 5.0  # silence after which a stream that waits for a model gets a comment

    _first_served_s: dict[str, float] = field(default_factory=dict)

    def assets(self) -> wire.Assets:
        """Returns the assets served now. Raises BackendError 503 while they are unknown."""
        assets = self.backend.assets()
        if assets.content_hash not in self._first_served_s:
            self._first_served_s[assets.content_hash] = self.unix_s()
        return assets

    def first_served_s(self, assets: wire.Assets) -> float:
        """Returns the Unix time at which this server first served `assets`."""
        return self._first_served_s[assets.content_hash]

    def lacks_model(self) -> bool:
        """Whether no model is known yet."""
        try:
            self.backend.assets()
        except BackendError:
            return True
        return False

    async def model(self) -> ServedModel:
        """Returns the model served now, after waiting as long as the backend does. Raises BackendError 503 if none is known."""
        await self.backend.wait_for_assets()
        return await self.models.get(self.assets())

    async def warm(self) -> None:
        """Loads the model if one is known, so that no request waits for it. A router may be ready before it knows a model."""
        try:
            assets = self.assets()
        except BackendError:
            return
        await self.models.get(assets)
