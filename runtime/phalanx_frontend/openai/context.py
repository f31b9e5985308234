"""What the routes of a door stand on."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx_api import wire
from phalanx_frontend.backend import Backend, BackendError
from phalanx_frontend.ids import draw_seed
from phalanx_frontend.limits import Limits
from phalanx_frontend.metrics import Clock, DoorMetrics
from phalanx_frontend.openai.served_model import DoorModel, Models


@dataclass(frozen=True, slots=True)
class Door:
    """What the routes stand on. `seconds` is a monotonic clock, `unix_s` the time of day.

    keep_alive_s: silence after which a stream that waits for a model gets a comment.
    """

    backend: Backend
    metrics: DoorMetrics
    limits: Limits
    models: Models = field(default_factory=Models)
    seconds: Clock = time.perf_counter
    unix_s: Clock = time.time
    draw_seed: Callable[[], int] = draw_seed
    keep_alive_s: float = 5.0

    _known_s: dict[str, float] = field(default_factory=dict)

    def assets(self) -> wire.Assets:
        """What is served now. Raises BackendError 503 while that is not known."""
        assets = self.backend.assets()
        if assets.content_hash not in self._known_s:
            self._known_s[assets.content_hash] = self.unix_s()
        return assets

    def known_s(self, assets: wire.Assets) -> float:
        """The time of day when these were first served here."""
        return self._known_s[assets.content_hash]

    def is_asleep(self) -> bool:
        """Whether no model is known yet."""
        try:
            self.backend.assets()
        except BackendError:
            return True
        return False

    async def model(self) -> DoorModel:
        """The model that is served now, waited for if the backend waits. Raises BackendError 503 while none is known."""
        await self.backend.awake()
        return await self.models.get(self.assets())

    async def warm(self) -> None:
        """Loads the model if one is known, so that no request waits for it. A router may be ready before it knows any."""
        try:
            assets = self.assets()
        except BackendError:
            return
        await self.models.get(assets)
