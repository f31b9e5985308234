"""Grammars compile while other requests continue; a waiting request can be aborted, refused, preempted and replayed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.engine.channel import ZmqChannel
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.rank.sampling.grammar_compilation import ThreadedGrammars
from tests.runtime.engine.slow_grammars import BROKEN, BUG, LARGE, SMALL, SlowCompiler, with_grammar
from tests.runtime.engine.threaded_engine import LIMITS, ThreadedEngine
from tests.runtime.fake_runner import FakeRunner, expected_output, make_request


def test_other_requests_proceed_while_a_grammar_compiles() -> None:
    with ThreadedEngine() as engine:
        engine.send(wire.Submit(1, with_grammar(LARGE)))
        assert engine.grammars.has_started.wait(20)
        others = {handle: with_grammar(grammar, make_request(3, 8, seed=handle)) for handle, grammar in ((2, None), (3, SMALL))}
        engine.send(*(wire.Submit(handle, request) for handle, request in others.items()))
        engine.until_ended(2, 3)
        assert {handle: engine.tokens[handle] for handle in others} == {h: expected_output(r) for h, r in others.items()}
        assert 1 not in engine.tokens and not any(plan.counts == [5] for plan in engine.runner.plans), "no step contains it yet"
        engine.grammars.may_continue.set()
        engine.until_ended(1)
        assert engine.tokens[1] == expected_output(with_grammar(LARGE))
        engine.send(wire.Submit(4, with_grammar(LARGE)))
        engine.until_ended(4)
        assert sorted(engine.grammars.compiled) == ["large", "small"]


def test_request_awaiting_its_grammar_counts_as_waiting() -> None:
    with ThreadedEngine() as engine:
        engine.send(wire.Submit(1, with_grammar(LARGE)))
        engine.until_load(1, 0)
        waits = engine.channel.waits
        assert not threading.Event().wait(0.2)
        assert engine.channel.waits <= waits + 1, "the loop does not spin: it blocks after its report"
        engine.send(*(wire.Submit(handle, with_grammar(LARGE)) for handle in (2, 3, 4)))
        engine.until_ended(4)
        assert engine.refused[4].status == 429, "three may wait"
        engine.grammars.may_continue.set()
        engine.until_ended(1, 2, 3)
        assert engine.grammars.compiled == ["large"], "equal grammars are compiled once"
        engine.until_load(0, 0)
        assert (engine.loads[-1].free_pages, engine.loads[-1].leaks) == (64, 0)


def test_request_awaiting_its_grammar_can_be_aborted() -> None:
    with ThreadedEngine() as engine:
        engine.send(wire.Submit(1, with_grammar(LARGE)), wire.Submit(2, with_grammar(LARGE)), wire.Abort([1]))
        engine.until_load(1, 0)
        engine.send(wire.Abort([2]))
        engine.until_load(0, 0)
        assert engine.loads[-1].leaks == 0 and engine.runner.plans == []
        engine.send(wire.Submit(1, with_grammar(LARGE)))
        engine.until_load(1, 0)
        engine.grammars.may_continue.set()
        engine.until_ended(1)
        assert engine.ended == [1] and engine.grammars.compiled == ["large"]


def test_abandoned_grammar_is_never_compiled() -> None:
    with ThreadedEngine() as engine:
        first, second, third = (with_grammar(wire.Grammar("regex", f"large {n}")) for n in range(3))
        engine.send(wire.Submit(1, first), wire.Submit(2, second), wire.Submit(3, third))
        engine.until_load(3, 0)
        engine.send(wire.Abort([3]))
        engine.until_load(2, 0)
        engine.grammars.may_continue.set()
        engine.until_ended(1, 2)
        engine.send(wire.Submit(4, with_grammar(SMALL)))
        engine.until_ended(4)
        assert sorted(engine.grammars.compiled) == ["large 0", "large 1", "small"]


@pytest.mark.parametrize(("grammar", "status", "message"), [(BROKEN, 400, "grammar: it is broken"), (BUG, 500, "see the log")])
def test_invalid_grammar_ends_its_requests_before_any_step(
    grammar: wire.Grammar, status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadedEngine() as engine:
        engine.send(*(wire.Submit(handle, with_grammar(grammar, make_request(4, 4, epoch=7))) for handle in (1, 2)))
        engine.until_ended(1, 2)
        for handle in (1, 2):
            refused = engine.refused[handle]
            assert (refused.status, refused.epoch) == (status, 7) and message in refused.message
        assert engine.runner.plans == []
        assert ("an internal bug" in caplog.text) == (status == 500)
        engine.send(wire.Submit(3, with_grammar(SMALL)))
        engine.until_ended(3)
        assert engine.tokens[3] == expected_output(with_grammar(SMALL))


def test_request_with_a_grammar_keeps_its_arrival_order() -> None:
    engine = ThreadedEngine(limits=Limits(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16))
    engine.send(wire.Submit(1, with_grammar(LARGE)))
    assert engine.loop.turn()
    engine.send(*(wire.Submit(handle, with_grammar(None, make_request(3, 5, seed=handle))) for handle in (2, 3)))
    assert engine.loop.turn()
    engine.grammars.may_continue.set()
    assert engine.channel.is_woken.wait(20)
    while not engine.loop.scheduler.is_idle():
        assert engine.loop.turn()
    engine.until_ended(1, 2, 3)
    assert engine.ended == [2, 1, 3]


def test_preempted_requests_hold_their_grammars_and_give_equal_tokens() -> None:
    requests = {handle: with_grammar(SMALL, make_request(8, 16, seed=handle)) for handle in range(4)}
    with ThreadedEngine(num_pages=14, limits=Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)) as engine:
        engine.send(*(wire.Submit(handle, request) for handle, request in requests.items()))
        engine.until_ended(*requests)
        engine.loads.clear()
        engine.until_load(0, 0)
        assert engine.loads[-1].preemptions > 0
        assert engine.tokens == {handle: expected_output(request) for handle, request in requests.items()}
        assert engine.grammars.compiled == ["small"]


def test_moved_stream_continues_its_grammar_from_delivered_tokens() -> None:
    whole = expected_output(make_request(5, 6))
    with ThreadedEngine() as engine:
        engine.send(wire.Submit(1, with_grammar(SMALL, make_request(5, 6, delivered=whole[:3], epoch=2))))
        engine.until_ended(1)
        assert engine.tokens[1] == whole[3:]


def test_channel_is_woken_and_blocks_again(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.PAIR)
    server.bind(f"ipc://{tmp_path}/engine")
    engine_context = zmq.Context[zmq.Socket[bytes]]()
    channel = ZmqChannel(f"ipc://{tmp_path}/engine", engine_context)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channel.receive, True)
        channel.wake()
        assert waiting.result(20) == []
        waiting = pool.submit(channel.receive, True)
        server.send(b"a")
        assert waiting.result(20) == [b"a"]
    channel.close()
    channel.wake()
    engine_context.term()
    context.destroy(linger=0)


def test_compiled_grammar_wakes_the_engine_over_the_channel(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.PAIR)
    server.bind(f"ipc://{tmp_path}/engine")
    grammars, engine_context = SlowCompiler(), zmq.Context[zmq.Socket[bytes]]()
    channel = ZmqChannel(f"ipc://{tmp_path}/engine", engine_context)
    thread = threading.Thread(target=EngineLoop(FakeRunner(64, 4), LIMITS, channel, grammars=ThreadedGrammars(grammars)).run)
    thread.start()
    server.send(wire.encode(wire.Submit(1, with_grammar(LARGE))))
    assert grammars.has_started.wait(20)
    grammars.may_continue.set()
    tokens: list[int] = []
    while len(tokens) < 6:
        assert server.poll(20_000), "no frame"
        frame = wire.decode_from_engine(server.recv())
        tokens += frame.tokens if isinstance(frame, wire.Tokens) else []
    assert tokens == expected_output(with_grammar(LARGE))
    channel_end = threading.Thread(target=engine_context.term)
    channel_end.start()
    thread.join(20)
    assert not thread.is_alive()
    channel.close()
    channel_end.join(20)
    context.destroy(linger=0)
