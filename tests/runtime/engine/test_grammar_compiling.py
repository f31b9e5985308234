"""Grammars are compiled beside the steps: others go on, and who waits can leave, be refused, be preempted and replayed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import zmq

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.engine.channel import ZmqChannel
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.engine.ports import GrammarCompiler, StepRunner
from phalanx_runtime.rank.sampling.grammar_threads import ThreadedGrammars
from tests.runtime.fake_runner import FakeRunner, expected_output, make_request

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, max_waiting=3)
LARGE, SMALL, BROKEN, BUG = (wire.Grammar("regex", text) for text in ("large", "small", "broken", "bug"))


class Slow:
    """Compiles the large grammar when it is let. Forgets what nobody holds, as far as it was told of it."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        self.compiled: list[str] = []
        self.known: dict[wire.Grammar, object] = {}

    def kept(self, grammar: wire.Grammar) -> object | None:
        return self.known.get(grammar)

    def compile(self, grammar: wire.Grammar) -> object:
        if grammar.text.startswith("large"):
            self.begun.set()
            assert self.go.wait(20)
        if grammar == BROKEN:
            raise GrammarError("it is broken")
        if grammar == BUG:
            raise ZeroDivisionError("a bug of ours")
        self.compiled.append(grammar.text)
        made = self.known[grammar] = object()
        return made


@dataclass
class Wire:
    """A channel that waits as the real one does, and counts how often it waited."""

    inbox: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)
    outbox: SimpleQueue[wire.FromEngine] = field(default_factory=SimpleQueue)
    waits: int = 0
    rung: threading.Event = field(default_factory=threading.Event)
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
        self.rung.set()


class Engine:
    """An engine that runs in a thread until the block ends, over a fake runner, or a real one with its grammars."""

    def __init__(
        self, num_pages: int = 64, limits: Limits = LIMITS, real: tuple[StepRunner, GrammarCompiler | None] | None = None
    ) -> None:
        self.grammars, self.wire, self.runner = Slow(), Wire(), FakeRunner(num_pages, 4)
        runner, grammars = real or (self.runner, ThreadedGrammars(self.grammars))
        self.loop = EngineLoop(runner, limits, self.wire, grammars=grammars)
        self._thread = threading.Thread(target=self.loop.run)
        self.tokens: dict[int, list[int]] = {}
        self.ended: list[int] = []
        self.refused: dict[int, wire.Refused] = {}
        self.loads: list[wire.Load] = []

    def __enter__(self) -> "Engine":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.grammars.go.set()
        self.wire.closed = True
        self.wire.wake()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def send(self, *frames: wire.ToEngine) -> None:
        for frame in frames:
            self.wire.inbox.put(wire.encode(frame))

    def until(self, *handles: int) -> None:
        """Returns when these requests have ended."""
        while not {*handles} <= {*self.ended, *self.refused}:
            self.hear()

    def until_load(self, waiting: int, running: int) -> None:
        """Returns when this was reported."""
        while not self.loads or (self.loads[-1].waiting, self.loads[-1].running) != (waiting, running):
            self.hear()

    def hear(self) -> None:
        match self.wire.outbox.get(timeout=20):
            case wire.Tokens() as frame:
                for handle, token in zip(frame.handles, frame.tokens, strict=True):
                    self.tokens.setdefault(handle, []).append(token)
                self.ended += [end.handle for end in frame.finished]
            case wire.Refused() as refused:
                self.refused[refused.handle] = refused
            case wire.Load() as load:
                self.loads.append(load)


def asking(grammar: wire.Grammar | None, request: wire.Request | None = None) -> wire.Request:
    request = request or make_request(5, 6)
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, grammar=grammar))


def test_other_requests_proceed_while_a_grammar_compiles() -> None:
    with Engine() as engine:
        engine.send(wire.Submit(1, asking(LARGE)))
        assert engine.grammars.begun.wait(20)
        others = {handle: asking(grammar, make_request(3, 8, seed=handle)) for handle, grammar in ((2, None), (3, SMALL))}
        engine.send(*(wire.Submit(handle, request) for handle, request in others.items()))
        engine.until(2, 3)
        assert {handle: engine.tokens[handle] for handle in others} == {h: expected_output(r) for h, r in others.items()}
        assert 1 not in engine.tokens and not any(plan.counts == [5] for plan in engine.runner.plans), "no step has it yet"
        engine.grammars.go.set()
        engine.until(1)
        assert engine.tokens[1] == expected_output(asking(LARGE))
        engine.send(wire.Submit(4, asking(LARGE)))
        engine.until(4)
        assert sorted(engine.grammars.compiled) == ["large", "small"]


def test_request_awaiting_its_grammar_counts_as_waiting() -> None:
    with Engine() as engine:
        engine.send(wire.Submit(1, asking(LARGE)))
        engine.until_load(1, 0)
        waits = engine.wire.waits
        assert not threading.Event().wait(0.2), "time to spin, if it did"
        assert engine.wire.waits == waits
        engine.send(*(wire.Submit(handle, asking(LARGE)) for handle in (2, 3, 4)))
        engine.until(4)
        assert engine.refused[4].status == 429, "three may wait"
        engine.grammars.go.set()
        engine.until(1, 2, 3)
        assert engine.grammars.compiled == ["large"], "equal grammars are compiled once"
        engine.until_load(0, 0)
        assert (engine.loads[-1].free_pages, engine.loads[-1].leaks) == (64, 0)


def test_request_awaiting_its_grammar_can_be_aborted() -> None:
    with Engine() as engine:
        engine.send(wire.Submit(1, asking(LARGE)), wire.Submit(2, asking(LARGE)), wire.Abort([1]))
        engine.until_load(1, 0)
        engine.send(wire.Abort([2]))
        engine.until_load(0, 0)
        assert engine.loads[-1].leaks == 0 and engine.runner.plans == []
        engine.send(wire.Submit(1, asking(LARGE)))
        engine.until_load(1, 0)
        engine.grammars.go.set()
        engine.until(1)
        assert engine.ended == [1] and engine.grammars.compiled == ["large"]


def test_abandoned_grammar_is_never_compiled() -> None:
    with Engine() as engine:
        first, second, third = (asking(wire.Grammar("regex", f"large {n}")) for n in range(3))
        engine.send(wire.Submit(1, first), wire.Submit(2, second), wire.Submit(3, third), wire.Abort([3]))
        engine.until_load(2, 0)
        engine.grammars.go.set()
        engine.until(1, 2)
        engine.send(wire.Submit(4, asking(SMALL)))
        engine.until(4)
        assert sorted(engine.grammars.compiled) == ["large 0", "large 1", "small"]


@pytest.mark.parametrize(("grammar", "status", "says"), [(BROKEN, 400, "grammar: it is broken"), (BUG, 500, "see the log")])
def test_invalid_grammar_ends_its_requests_before_any_step(
    grammar: wire.Grammar, status: int, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine() as engine:
        engine.send(*(wire.Submit(handle, asking(grammar, make_request(4, 4, epoch=7))) for handle in (1, 2)))
        engine.until(1, 2)
        for handle in (1, 2):
            refused = engine.refused[handle]
            assert (refused.status, refused.epoch) == (status, 7) and says in refused.message
        assert engine.runner.plans == []
        assert ("a bug of ours" in caplog.text) == (status == 500)
        engine.send(wire.Submit(3, asking(SMALL)))
        engine.until(3)
        assert engine.tokens[3] == expected_output(asking(SMALL))


def test_request_with_a_grammar_keeps_its_arrival_order() -> None:
    engine = Engine(limits=Limits(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16))
    engine.send(wire.Submit(1, asking(LARGE)))
    assert engine.loop.turn()
    engine.send(*(wire.Submit(handle, asking(None, make_request(3, 5, seed=handle))) for handle in (2, 3)))
    assert engine.loop.turn()
    engine.grammars.go.set()
    assert engine.wire.rung.wait(20)
    while not engine.loop._scheduler.is_idle():
        assert engine.loop.turn()
    engine.until(1, 2, 3)
    assert engine.ended == [2, 1, 3]


def test_preempted_requests_hold_their_grammars_and_give_equal_tokens() -> None:
    requests = {handle: asking(SMALL, make_request(8, 16, seed=handle)) for handle in range(4)}
    with Engine(num_pages=14, limits=Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)) as engine:
        engine.send(*(wire.Submit(handle, request) for handle, request in requests.items()))
        engine.until(*requests)
        engine.loads.clear()
        engine.until_load(0, 0)
        assert engine.loads[-1].preemptions > 0
        assert engine.tokens == {handle: expected_output(request) for handle, request in requests.items()}
        assert engine.grammars.compiled == ["small"]


def test_moved_stream_continues_its_grammar_from_delivered_tokens() -> None:
    whole = expected_output(make_request(5, 6))
    with Engine() as engine:
        engine.send(wire.Submit(1, asking(SMALL, make_request(5, 6, delivered=whole[:3], epoch=2))))
        engine.until(1)
        assert engine.tokens[1] == whole[3:]


def test_the_real_channel_is_woken_and_sleeps_again(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.PAIR)
    server.bind(f"ipc://{tmp_path}/engine")
    channel = ZmqChannel(f"ipc://{tmp_path}/engine")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channel.receive, True)
        channel.wake()
        assert waiting.result(20) == []
        waiting = pool.submit(channel.receive, True)
        server.send(b"a")
        assert waiting.result(20) == [b"a"]
    channel.close()
    channel.wake()
    context.destroy(linger=0)


def test_compiled_grammar_wakes_the_engine_over_the_channel(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.PAIR)
    server.bind(f"ipc://{tmp_path}/engine")
    grammars, theirs = Slow(), zmq.Context[zmq.Socket[bytes]]()
    channel = ZmqChannel(f"ipc://{tmp_path}/engine", theirs)
    thread = threading.Thread(target=EngineLoop(FakeRunner(64, 4), LIMITS, channel, grammars=ThreadedGrammars(grammars)).run)
    thread.start()
    server.send(wire.encode(wire.Submit(1, asking(LARGE))))
    assert grammars.begun.wait(20)
    grammars.go.set()
    tokens: list[int] = []
    while len(tokens) < 6:
        assert server.poll(20_000), "no frame came"
        frame = wire.decode_from_engine(server.recv())
        tokens += frame.tokens if isinstance(frame, wire.Tokens) else []
    assert tokens == expected_output(asking(LARGE))
    channel_end = threading.Thread(target=theirs.term)
    channel_end.start()
    thread.join(20)
    assert not thread.is_alive()
    channel.close()
    channel_end.join(20)
    context.destroy(linger=0)
