"""A rank's pipeline stage, and its exchange with other stages.

    StepPlan and other orders    rank 0 -> all ranks              in order; CompileOrders for the sampling rank
    hidden states                stage s -> stage s + 1           between ranks with the same index in their stage
    StepResult and others        sampling rank -> rank 0

The sampling rank has the logits: a result has some hundred bytes, the logits of 64 rows 12 MB. Rank 0 receives in a thread, so no
send waits for an earlier stage.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.step_plan import AdapterOrder, AdapterResult, CompileOrder, CompileResult, StepPlan, StepResult
from phalanx_runtime.model.partition import Stage

_encode = msgspec.msgpack.Encoder().encode
Order = StepPlan | CompileOrder | AdapterOrder
Result = StepResult | CompileResult | AdapterResult
_decode_orders = msgspec.msgpack.Decoder(list[Order]).decode
_decode_result = msgspec.msgpack.Decoder(Result).decode


class Pipeline:
    """One rank's `stage`, its ranks (`peers`) and all ranks (`world`). Methods raise PeerLost."""

    def __init__(self, world: Collective, num_stages: int = 1) -> None:
        """All ranks call it together."""
        self._size = world.world_size // num_stages
        index = world.rank // self._size
        ranks = range(index * self._size, (index + 1) * self._size)
        self.world = world
        self.stage = Stage(index, num_stages)
        self.peers = world if num_stages == 1 else world.subgroup(ranks)
        self.sampling_rank = (num_stages - 1) * self._size
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._adapter_results: queue.SimpleQueue[AdapterResult | BaseException] = queue.SimpleQueue()
        self._receiver = threading.Thread(target=self._receive_results, name="results", daemon=True)
        self._sending = threading.Lock()
        self._on_compiled: Callable[[CompileResult], None] = _ignore
        self._unsent_orders: list[CompileOrder | AdapterOrder] = []
        self._num_plans = 0
        """In flight, if results come from another stage."""
        self._unread: deque[Order] = deque()

    @property
    def is_sampling_rank(self) -> bool:
        """Whether this rank samples."""
        return self.world.rank == self.sampling_rank

    def on_compiled(self, handle: Callable[[CompileResult], None]) -> None:
        """Sets the receiver of CompileResults, called in a thread. Rank 0 only."""
        self._on_compiled = handle

    def send_plan(self, plan: StepPlan | None) -> None:
        """Sends unsent orders and a plan; without a plan, ends `next_order`. Rank 0 only."""
        self._num_plans += plan is not None
        self._broadcast([] if plan is None else [*self._unsent_orders, plan])

    def send_order(self, order: CompileOrder | AdapterOrder) -> None:
        """Sends an order if no plan is in flight, else with the next plan. Rank 0 only.

        Ranks in a step receive nothing, and the collective buffers few messages.
        """
        self._unsent_orders.append(order)
        self._send_orders()

    def next_order(self) -> Order | None:
        """Waits for a plan or order; no value at the end. Not on rank 0."""
        if not self._unread:
            message = self.world.broadcast(None)
            if not message:
                return None
            self._unread.extend(_decode_orders(message))
        return self._unread.popleft()

    def receive_from_previous(self, tensor: Tensor) -> Tensor:
        """Fills the tensor. Any shape, as sent."""
        return self.world.receive(tensor, self.world.rank - self._size)

    def send_to_next(self, tensor: Tensor) -> None:
        """Sends a tensor. Any shape."""
        self.world.send(tensor, self.world.rank + self._size)

    def send_result(self, result: Result | None) -> None:
        """Sends a result; without one, ends the results. Sampling rank only; thread-safe."""
        message = b"" if result is None else _encode(result)
        with self._sending:
            self.world.send(torch.tensor([len(message)]), 0)
            if message:
                self.world.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0)

    def next_result(self) -> StepResult:
        """Waits for a result. Rank 0 only. Raises the error of the receiving thread."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        self._num_plans -= 1
        self._send_orders()
        return result

    def next_adapter_result(self) -> AdapterResult:
        """Waits for the result of an AdapterOrder. Rank 0 only, of several stages. Raises the error of the receiving thread."""
        result = self._adapter_results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def _send_orders(self) -> None:
        if self._unsent_orders and not self._num_plans:
            self._broadcast(self._unsent_orders)

    def _broadcast(self, messages: Sequence[Order]) -> None:
        if self.stage.count > 1 and self._receiver.ident is None:
            self._receiver.start()  # not before: during loading the sampling rank sends other messages
        if self.world.world_size > 1:
            self.world.broadcast(_encode(messages) if messages else b"")
        self._unsent_orders.clear()

    def _receive_results(self) -> None:
        try:
            while size := int(self.world.receive(torch.zeros(1, dtype=torch.int64), self.sampling_rank)):
                message = self.world.receive(torch.zeros(size, dtype=torch.uint8), self.sampling_rank)
                result: Result = _decode_result(message.numpy().tobytes())
                match result:
                    case StepResult():
                        self._results.put(result)
                    case AdapterResult():
                        self._adapter_results.put(result)
                    case CompileResult():
                        self._on_compiled(result)
        except BaseException as error:
            self._results.put(error)
            self._adapter_results.put(error)


def _ignore(result: CompileResult) -> None:
    """No order is sent before `on_compiled`."""
