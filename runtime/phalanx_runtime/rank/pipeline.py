"""A rank's place in a pipeline of stages, and what it exchanges with the ranks of other stages.

    plan     rank 0 -> all             every rank obeys the plans in the order in which they were made
    hidden   stage s -> stage s + 1    from each rank to the one of the same place in the next stage
    result   drawer -> rank 0          the drawer, first rank of the last stage, draws the tokens

Ranks fill one stage after the other, so that the ranks of a stage, who talk most, are in one pod. Tokens are drawn where the
scores are: a result has some hundred bytes, the scores of 64 rows of a real vocabulary have 12 MB. A thread of rank 0 takes
results as they come. So the drawer never waits for rank 0, a stage waits only for those after it, and nobody waits in a circle.
"""

import queue
import threading

import torch
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.model.partition import Stage


class Pipeline:
    """One rank's stage, the ranks that share it (`peers`) and all ranks (`world`). One stage moves nothing."""

    def __init__(self, world: Collective, num_stages: int = 1) -> None:
        """All ranks call it together. Raises PeerLost."""
        self._size = world.world_size // num_stages
        index = world.rank // self._size
        own = range(index * self._size, (index + 1) * self._size)
        self.world = world
        self.stage = Stage(index, num_stages)
        self.peers = world if num_stages == 1 else world.subgroup(own)
        self.drawer = (num_stages - 1) * self._size
        self._results: queue.SimpleQueue[bytes | BaseException] = queue.SimpleQueue()
        self._inbox = threading.Thread(target=self._take_results, name="results", daemon=True)

    @property
    def draws(self) -> bool:
        """Whether this rank is the drawer."""
        return self.world.rank == self.drawer

    def tell(self, plan: bytes) -> None:
        """Sends a plan to all ranks; nothing says that no plan follows. Only on rank 0. Raises PeerLost."""
        if self.stage.count > 1 and self._inbox.ident is None:
            self._inbox.start()  # not before: while ranks load, other messages come from the drawer
        if self.world.world_size > 1:
            self.world.broadcast(plan)

    def told(self) -> bytes:
        """The next plan, whenever it comes. Not on rank 0. Raises PeerLost."""
        return self.world.broadcast(None)

    def receive(self, hidden: Tensor) -> Tensor:
        """The tensor, filled with what the stage before handed on. Raises PeerLost."""
        return self.world.receive(hidden, self.world.rank - self._size)

    def hand_on(self, hidden: Tensor) -> None:
        """Gives the hidden state to the next stage. Raises PeerLost."""
        self.world.send(hidden, self.world.rank + self._size)

    def give_result(self, result: bytes) -> None:
        """Tells rank 0 what was drawn; nothing says that no result follows. Only on the drawer. Raises PeerLost."""
        self.world.send(torch.tensor([len(result)]), 0)
        if result:
            self.world.send(torch.frombuffer(bytearray(result), dtype=torch.uint8), 0)

    def result(self) -> bytes:
        """The drawer's next result. Only on rank 0. Raises PeerLost."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def _take_results(self) -> None:
        try:
            while size := int(self.world.receive(torch.zeros(1, dtype=torch.int64), self.drawer)):
                self._results.put(self.world.receive(torch.zeros(size, dtype=torch.uint8), self.drawer).numpy().tobytes())
        except BaseException as error:
            self._results.put(error)
