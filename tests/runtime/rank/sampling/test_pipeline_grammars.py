"""With several stages the sampling rank compiles grammars concurrently with steps, before their use, and keeps them."""

import threading
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
import torch

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.step_plan import CompileOrder, CompileResult, NewRow, StepPlan
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.sampling import grammar as module
from phalanx_runtime.rank.sampling.grammar import UNSUPPORTED_GRAMMARS, CompiledGrammar, RankGrammars
from phalanx_runtime.rank.sampling.grammar_compilation import BothGrammars, GrammarService, RemoteGrammars, ThreadedGrammars
from tests.runtime.engine.threaded_engine import ThreadedEngine
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import serve
from tests.runtime.tiny import EOS_ID, save_tiny

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
HELD, OTHER, BROKEN, BUG = (wire.Grammar("regex", text) for text in ("[a-f]{9}", "[g-k]{9}", "(", "a bug"))
GROUPS = {"pp2": ([2], 2), "pp2 x tp2": ([4], 2), "pp2 over two pods": ([1, 1], 2), "pp3": ([3], 3)}
groups = pytest.mark.parametrize(("pods", "stages"), GROUPS.values(), ids=GROUPS.keys())


class SlowGrammars(RankGrammars):
    """Compiles HELD only after `may_continue`, and records the threads of all compilations."""

    may_continue: ClassVar[threading.Event]
    has_started: ClassVar[threading.Event]
    threads: ClassVar[list[str]]

    def compile(self, grammar: wire.Grammar) -> CompiledGrammar:
        self.threads.append(threading.current_thread().name)
        if grammar == HELD:
            self.has_started.set()
            assert self.may_continue.wait(30)
        if grammar == BUG:
            raise ZeroDivisionError("a bug in the compiler")
        return super().compile(grammar)


@pytest.fixture
def slow() -> type[SlowGrammars]:
    events = {"may_continue": threading.Event(), "has_started": threading.Event(), "threads": []}
    return type("SlowGrammarsOfOneTest", (SlowGrammars,), events)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("staged") / "model", "qwen2")


def build(stages: int, slow: type[RankGrammars] = RankGrammars, num_pages: int = 64) -> Build:
    return Build(torch.float64, stages=stages, grammars=slow, num_pages=num_pages)


def make_request(grammar: wire.Grammar | None, seed: int = 0, num_tokens: int = 12, epoch: int = 1) -> wire.Request:
    sampling = wire.Sampling(max_tokens=num_tokens, seed=seed, temperature=1.0, stop_token_ids=[EOS_ID], grammar=grammar)
    return wire.Request(id=f"r{seed}", epoch=epoch, prompt=[3 + seed, 7, 9], delivered=[], sampling=sampling)


def alone(folder: Path, request: wire.Request) -> list[int]:
    """Returns the tokens of the request on one rank."""
    return on_ranks(folder, [1], build(1), lambda runner: serve(runner, [request], LIMITS))[0].tokens


@groups
def test_steps_continue_while_the_sampling_rank_compiles(
    folder: Path, slow: type[SlowGrammars], pods: list[int], stages: int
) -> None:
    requests = {1: make_request(HELD, 1), 2: make_request(None, 2), 3: make_request(OTHER, 3)}

    def work(runner: ModelRunner) -> dict[int, list[int]]:
        with ThreadedEngine(limits=LIMITS, real=(runner, runner.grammars())) as engine:
            engine.send(wire.Submit(1, requests[1]))
            assert slow.has_started.wait(30)
            engine.send(wire.Submit(2, requests[2]), wire.Submit(3, requests[3]))
            engine.until_ended(2, 3)
            assert 1 not in engine.tokens, "its grammar is not compiled"
            slow.may_continue.set()
            engine.until_ended(1)
            engine.send(wire.Submit(4, msgspec.structs.replace(requests[1], id="again")))
            engine.until_ended(4)
            assert engine.tokens.pop(4) == engine.tokens[1]
            return engine.tokens

    tokens = on_ranks(folder, pods, build(stages, slow), work)
    assert tokens == {handle: alone(folder, one) for handle, one in requests.items()}
    assert len(slow.threads) == 2 and all(name.startswith("grammar") for name in slow.threads), "each once, in a thread"


@groups
def test_burst_of_orders_waits_for_no_computing_rank(
    folder: Path, slow: type[SlowGrammars], pods: list[int], stages: int
) -> None:
    """The sampling rank is blocked in a step and receives no message."""
    several = [wire.Grammar("regex", f"[a-{letter}]{{9}}") for letter in "bcdefgh"]

    def work(runner: ModelRunner) -> int:
        grammars = runner.grammars()
        held = make_request(HELD, 1).sampling
        runner.start(
            StepPlan(
                step=1,
                admitted=[NewRow(0, held, 3, [4, 7, 9])],
                rows=[0],
                starts=[0],
                counts=[3],
                pages=[[0]],
                tokens=[4, 7, 9],
                draws=[(0, 0)],
            )
        )
        assert slow.has_started.wait(30)
        futures = [grammars.compile(grammar) for grammar in several]
        slow.may_continue.set()
        assert len(runner.finish().tokens) == 1
        return sum(future.result(30) is not None for future in futures)

    assert on_ranks(folder, pods, build(stages, slow), work) == len(several)


def test_sampling_rank_reports_an_unusable_grammar(
    folder: Path, slow: type[SlowGrammars], caplog: pytest.LogCaptureFixture
) -> None:
    def work(runner: ModelRunner) -> dict[int, wire.Refused]:
        with ThreadedEngine(limits=LIMITS, real=(runner, runner.grammars())) as engine:
            engine.send(
                wire.Submit(1, make_request(BROKEN, 1, epoch=7)),
                wire.Submit(2, make_request(BUG, 2)),
                wire.Submit(3, make_request(OTHER, 3)),
            )
            engine.until_ended(1, 2, 3)
            assert engine.tokens[3]
            return engine.refused

    refused = on_ranks(folder, [2], build(2, slow), work)
    assert (refused[1].status, refused[1].epoch) == (400, 7) and "unclosed group" in refused[1].message
    assert refused[2].status == 500 and "see the log" in refused[2].message
    assert "a bug in the compiler" in caplog.text


def test_preempted_requests_keep_their_grammars_on_the_sampling_rank(
    folder: Path, slow: type[SlowGrammars], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More grammars than the cache holds, and so few pages that requests are preempted."""
    monkeypatch.setattr(module, "CACHED_GRAMMARS", 1)
    requests = {n: make_request(wire.Grammar("regex", f"[a-{letter}]{{30}}"), n, 30) for n, letter in enumerate("bcdef")}

    def work(runner: ModelRunner) -> tuple[dict[int, list[int]], int]:
        with ThreadedEngine(limits=LIMITS, real=(runner, runner.grammars())) as engine:
            engine.send(*(wire.Submit(handle, one) for handle, one in requests.items()))
            engine.until_ended(*requests)
            engine.until_load(0, 0)
            return engine.tokens, engine.loads[-1].preemptions

    tokens, preemptions = on_ranks(folder, [2], build(2, slow, num_pages=8), work)
    assert preemptions > 0
    assert len(slow.threads) == len(requests) and all(name.startswith("grammar") for name in slow.threads)
    assert tokens == {handle: alone(folder, one) for handle, one in requests.items()}


class FakeCompiler:
    """Caches every grammar; "bad" fails, and "late" waits for `may_continue`."""

    def __init__(self) -> None:
        self.compiled: dict[str, str] = {}
        self.may_continue = threading.Event()

    def find(self, grammar: wire.Grammar) -> object | None:
        return self.compiled.get(grammar.text)

    def compile(self, grammar: wire.Grammar) -> object:
        if grammar.text == "bad":
            raise GrammarError("it is bad")
        if grammar.text == "late":
            assert self.may_continue.wait(20)
        return self.compiled.setdefault(grammar.text, f"compiled {grammar.text}")


def test_sampling_rank_keeps_a_grammar_while_rank_0_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED_GRAMMARS", 0)
    orders: list[CompileOrder] = []
    remote = RemoteGrammars(orders.append)
    a, b = (wire.Grammar("regex", letter) for letter in "ab")
    first = remote.compile(a)
    assert remote.find(a) is None and not first.cancel() and not first.done()
    remote.complete(CompileResult(orders[0].number))
    held = first.result()
    assert remote.find(a) is held
    del held, first
    assert remote.find(a) is None
    second = remote.compile(b)
    assert orders[1] == CompileOrder(orders[1].number, b, [orders[0].number])
    remote.complete(CompileResult(orders[1].number, "no", is_bug=True))
    assert isinstance(second.exception(), RuntimeError)


def test_service_answers_each_order_once_before_its_end() -> None:
    results: list[CompileResult] = []
    sent = threading.Semaphore(0)

    def send(result: CompileResult) -> None:
        results.append(result)
        sent.release()

    compiler = FakeCompiler()
    service = GrammarService(compiler, send)
    for number, text in enumerate(["a", "bad", "a"]):
        service.execute(CompileOrder(number, wire.Grammar("regex", text)))
        assert sent.acquire(timeout=20)
    assert results == [CompileResult(0), CompileResult(1, "it is bad"), CompileResult(2)]
    service.execute(CompileOrder(3, wire.Grammar("regex", "late")))
    service.close()
    compiler.may_continue.set()
    for thread in threading.enumerate():
        if thread.name.startswith("grammar"):
            thread.join(20)
    assert len(results) == 3
    GrammarService(UNSUPPORTED_GRAMMARS, send).execute(CompileOrder(4, wire.Grammar("regex", "a")))
    assert sent.acquire(timeout=20)
    assert "without grammars" in results[-1].why and not results[-1].is_bug


def test_drafting_rank_has_the_grammar_before_its_use() -> None:
    orders: list[CompileOrder] = []
    remote, compiler = RemoteGrammars(orders.append), FakeCompiler()
    both = BothGrammars(remote, ThreadedGrammars(compiler))
    late, bad, soon = (wire.Grammar("regex", text) for text in ("late", "bad", "soon"))
    waiting, wrong, quick = both.compile(late), both.compile(bad), both.compile(soon)
    for order in orders:
        remote.complete(CompileResult(order.number, "no" if order.grammar == bad else ""))
    assert isinstance(wrong.exception(20), GrammarError)
    assert quick.result(20) is not None and both.find(soon) is not None
    assert not waiting.done() and both.find(late) is None and not waiting.cancel()
    compiler.may_continue.set()
    held = waiting.result(20)
    assert both.find(late) == held
    both.close()
