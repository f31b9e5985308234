"""An engine in a thread, over a channel of queues."""

import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.engine.ports import GrammarCompiler, StepRunner
from phalanx_runtime.rank.sampling.grammar_compilation import ThreadedGrammars
from tests.runtime.engine.slow_grammars import SlowCompiler
from tests.runtime.fake_runner import FakeRunner

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, max_waiting=3)


@dataclass
class QueueChannel:
    """A channel that blocks as the real one does, and counts how often it blocked."""

    inbox: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)
    outbox: SimpleQueue[wire.FromEngine] = field(default_factory=SimpleQueue)
    waits: int = 0
    is_woken: threading.Event = field(default_factory=threading.Event)
    closed: bool = False

    def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
        messages = []
        if block:
            self.waits += 1
            messages = [self.inbox.get(timeout=20)]
        while not self.inbox.empty():
            messages.append(self.inbox.get())
        return None if self.closed else [message for message in messages if message is not None]

    def send(self, message: bytes) -> None:
        self.outbox.put(wire.decode_from_engine(message))

    def wake(self) -> None:
        self.inbox.put(None)
        self.is_woken.set()


class ThreadedEngine:
    """An engine in a thread until the block ends, over a fake runner or a real one with its grammars."""

    def __init__(
        self, num_pages: int = 64, limits: Limits = LIMITS, real: tuple[StepRunner, GrammarCompiler] | None = None
    ) -> None:
        self.grammars, self.channel, self.runner = SlowCompiler(), QueueChannel(), FakeRunner(num_pages, 4)
        runner, grammars = real or (self.runner, ThreadedGrammars(self.grammars))
        self.loop = EngineLoop(runner, limits, self.channel, grammars=grammars)
        self._thread = threading.Thread(target=self.loop.run)
        self.tokens: dict[int, list[int]] = {}
        self.ended: list[int] = []
        self.refused: dict[int, wire.Refused] = {}
        self.loads: list[wire.Load] = []

    def __enter__(self) -> "ThreadedEngine":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.grammars.may_continue.set()
        self.channel.closed = True
        self.channel.wake()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def send(self, *frames: wire.ToEngine) -> None:
        for frame in frames:
            self.channel.inbox.put(wire.encode(frame))

    def until_ended(self, *handles: int) -> None:
        """Returns once these requests have ended."""
        while not {*handles} <= {*self.ended, *self.refused}:
            self.receive()

    def until_load(self, waiting: int, running: int) -> None:
        """Returns once a load report has these counts."""
        while not self.loads or (self.loads[-1].waiting, self.loads[-1].running) != (waiting, running):
            self.receive()

    def receive(self) -> None:
        match self.channel.outbox.get(timeout=20):
            case wire.Tokens() as frame:
                for handle, token in zip(frame.handles, frame.tokens, strict=True):
                    self.tokens.setdefault(handle, []).append(token)
                self.ended += [end.handle for end in frame.finished]
            case wire.Refused() as refused:
                self.refused[refused.handle] = refused
            case wire.Load() as load:
                self.loads.append(load)
