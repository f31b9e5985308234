"""Which adapter is in which slot of the ranks.

A request keeps the slot of its adapter from submission to its end, also while it waits or is preempted. An adapter that is
removed takes no more requests; its slot is free once no request has it. Until then it can return to the slot.
"""

from collections.abc import Collection

from phalanx_api import wire
from phalanx_runtime.core.admission import Refusal


class AdapterTable:
    """Adapters by slot, from 1."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: dict[wire.Adapter, int] = {}
        self._removed: dict[wire.Adapter, int] = {}  # slots that no other adapter has got

    def slot_of(self, adapter: wire.Adapter | None) -> int | Refusal:
        """Returns the slot of a request's adapter; 0 without one."""
        if adapter is None:
            return 0
        slot = self._slots.get(adapter)
        if slot is None:
            return Refusal(404, "model_not_found", f"the adapter {adapter.name} is not loaded in this group")
        return slot

    @property
    def full_reason(self) -> str:
        """Why no slot is free."""
        if not self._num_slots:
            return "the group has no slots for adapters: start it with --enable-lora"
        return f"all {self._num_slots} slots hold adapters or have running requests: unload one, or raise --max-loras"

    def has(self, adapter: wire.Adapter) -> bool:
        """Returns whether requests may name the adapter."""
        return adapter in self._slots

    def free_slot(self, used: Collection[int]) -> int | None:
        """Returns a slot without an adapter, if there is one. `used`: slots of present requests."""
        taken = {*self._slots.values(), *used}
        return next((slot for slot in range(1, self._num_slots + 1) if slot not in taken), None)

    def add(self, adapter: wire.Adapter, slot: int) -> None:
        """Records an adapter that all ranks have loaded."""
        self._removed = {other: place for other, place in self._removed.items() if place != slot}
        self._slots[adapter] = slot

    def restore(self, adapter: wire.Adapter, used: Collection[int]) -> bool:
        """Returns a removed adapter to its slot, if requests still have it. Returns whether it did. `used`: see `free_slot`."""
        slot = self._removed.get(adapter)
        if slot is None or slot not in used:
            return False
        self.add(adapter, slot)
        return True

    def remove(self, adapter: wire.Adapter) -> None:
        """Removes an adapter. Ignores unknown ones."""
        slot = self._slots.pop(adapter, None)
        if slot is not None:
            self._removed[adapter] = slot
