"""A rank's place in a pipeline of stages, and what it exchanges with the ranks of other stages.

    plan     rank 0 -> all             every rank obeys the plans in the order in which they were made; before one stand
                                       orders for grammars, which are the drawer's
    hidden   stage s -> stage s + 1    from each rank to the one of the same place in the next stage
    result   drawer -> rank 0          the drawer, first rank of the last stage, draws the tokens; answers to those orders too

Ranks fill one stage after the other, so that the ranks of a stage, who talk most, are in one pod. Tokens are drawn where the
scores are: a result has some hundred bytes, the scores of 64 rows of a real vocabulary have 12 MB. A thread of rank 0 takes
results as they come. So the drawer never waits for rank 0, a stage waits only for those after it, and nobody waits in a circle.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.step_plan import CompileOrder, CompileResult, StepPlan, StepResult
from phalanx_runtime.model.partition import Stage

_encode = msgspec.msgpack.Encoder().encode
_decode_told = msgspec.msgpack.Decoder(list[StepPlan | CompileOrder]).decode
_decode_given = msgspec.msgpack.Decoder(StepResult | CompileResult).decode


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
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._inbox = threading.Thread(target=self._take_results, name="results", daemon=True)
        self._giving = threading.Lock()
        self._hear: Callable[[CompileResult], None] | None = None
        self._orders: list[CompileOrder] = []
        """Not sent yet."""
        self._num_plans = 0
        """Those told whose result has not come, where it comes from another stage."""
        self._unread: deque[StepPlan | CompileOrder] = deque()

    @property
    def draws(self) -> bool:
        """Whether this rank is the drawer."""
        return self.world.rank == self.drawer

    def listen(self, hear: Callable[[CompileResult], None]) -> None:
        """From now on `hear` is told, on a thread of its own, what became of orders for grammars. Only on rank 0."""
        self._hear = hear

    def tell(self, plan: StepPlan | None) -> None:
        """Sends a plan to all ranks, behind orders that wait; None says that nothing follows. Only on rank 0. Raises PeerLost."""
        self._num_plans += plan is not None
        self._send([] if plan is None else [*self._orders, plan])

    def ask(self, order: CompileOrder) -> None:
        """Sends an order to all ranks: with the next plan, or now if no plan is in flight. A rank that computes takes no message,
        and there is room for a few, which are the plans'. Only on rank 0. Raises PeerLost."""
        self._orders.append(order)
        self._send_orders()

    def told(self) -> StepPlan | CompileOrder | None:
        """The next of them, whenever it comes. Not on rank 0. Raises PeerLost."""
        if not self._unread:
            message = self.world.broadcast(None)
            if not message:
                return None
            self._unread.extend(_decode_told(message))
        return self._unread.popleft()

    def receive(self, hidden: Tensor) -> Tensor:
        """The tensor, filled with what the stage before handed on. Raises PeerLost."""
        return self.world.receive(hidden, self.world.rank - self._size)

    def hand_on(self, hidden: Tensor) -> None:
        """Gives the hidden state to the next stage. Raises PeerLost."""
        self.world.send(hidden, self.world.rank + self._size)

    def give(self, given: StepResult | CompileResult | None) -> None:
        """Tells rank 0 what was drawn, or what became of an order; None says that nothing follows. Only on the drawer, where
        any thread may call it. Raises PeerLost."""
        message = b"" if given is None else _encode(given)
        with self._giving:
            self.world.send(torch.tensor([len(message)]), 0)
            if message:
                self.world.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0)

    def result(self) -> StepResult:
        """The drawer's next result. Only on rank 0. Raises PeerLost."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        self._num_plans -= 1
        self._send_orders()
        return result

    def _send_orders(self) -> None:
        """Sends orders that wait, if no rank computes."""
        if self._orders and not self._num_plans:
            self._send(self._orders)

    def _send(self, messages: Sequence[StepPlan | CompileOrder]) -> None:
        if self.stage.count > 1 and self._inbox.ident is None:
            self._inbox.start()  # not before: while ranks load, other messages come from the drawer
        if self.world.world_size > 1:
            self.world.broadcast(_encode(messages) if messages else b"")
        self._orders.clear()

    def _take_results(self) -> None:
        try:
            while size := int(self.world.receive(torch.zeros(1, dtype=torch.int64), self.drawer)):
                message = self.world.receive(torch.zeros(size, dtype=torch.uint8), self.drawer)
                given: StepResult | CompileResult = _decode_given(message.numpy().tobytes())
                if isinstance(given, StepResult):
                    self._results.put(given)
                elif self._hear is not None:
                    self._hear(given)
        except BaseException as error:
            self._results.put(error)
