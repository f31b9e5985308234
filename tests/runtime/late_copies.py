"""Host memory that copies each layer at the last moment: when a step waits for it."""

from collections.abc import Sequence

from phalanx_runtime.core.step_plan import HostCopy, HostResize, PoolShape
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.rank.tiers.disk_pages import DiskPages
from phalanx_runtime.rank.tiers.host_pages import HostPages


class LateCopies:
    """Implements `HostCopies` with one host memory per layer. A step that does not wait for a layer reads its former content."""

    disk: DiskPages | None = None
    has_layers = True

    def __init__(self, caches: list[LayerCache], pool: PoolShape) -> None:
        self.num_late = 0
        """Layers copied while a step waited for them."""
        self.ignores_waits = False
        """Whether waits for layers return without the copies."""
        self._layers = [HostPages([cache], pool.host_floor, limit=pool.num_host_pages) for cache in caches]
        self._late: dict[int, Sequence[HostCopy]] = {}
        """By layer."""

    def start(
        self, copies: Sequence[HostCopy], keys: Sequence[bytes], *, must_wait: bool, resize: HostResize | None = None
    ) -> float:
        self.wait()
        self._late = dict.fromkeys(range(len(self._layers)), copies)
        if must_wait or not any(is_load for is_load, _, _ in copies):
            self.wait()
        for layer in self._layers:
            layer.start((), must_wait=True, resize=resize)
        return 0.0

    def wait(self) -> None:
        for number in list(self._late):
            self._copy(number)

    def wait_for_layer(self, layer: int) -> float:
        if layer in self._late and not self.ignores_waits:
            self._copy(layer)
            self.num_late += 1
        return 0.0

    def write(self, slot: int, page: memoryview) -> None:
        raise AssertionError("no disk has pages")

    def read(self, slot: int) -> list[memoryview]:
        return [piece for layer in self._layers for piece in layer.read(slot)]

    def take_loads(self) -> tuple[int, float]:
        loads = [layer.take_loads() for layer in self._layers]
        return loads[0][0], sum(seconds for _, seconds in loads)

    def _copy(self, number: int) -> None:
        copies = self._late.pop(number)
        self._layers[number].start(copies, must_wait=True)
