"""With several stages the rank that draws compiles grammars beside its steps, before any step needs them, and holds them."""

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
from phalanx_runtime.rank.sampling.grammar import CompiledGrammar, RankGrammars
from phalanx_runtime.rank.sampling.grammar_threads import BothGrammars, GrammarService, RemoteGrammars, ThreadedGrammars
from tests.runtime.engine.test_grammar_compiling import Engine
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import serve
from tests.runtime.tiny import EOS_ID, save_tiny

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
HELD, OTHER, BROKEN, BUG = (wire.Grammar("regex", text) for text in ("[a-f]{9}", "[g-k]{9}", "(", "a bug"))
GROUPS = {"pp2": ([2], 2), "pp2 x tp2": ([4], 2), "pp2 over two pods": ([1, 1], 2), "pp3": ([3], 3)}
groups = pytest.mark.parametrize(("pods", "stages"), GROUPS.values(), ids=GROUPS.keys())


class Slow(RankGrammars):
    """Compiles one grammar when it is let, and remembers in which threads any was compiled."""

    go: ClassVar[threading.Event]
    begun: ClassVar[threading.Event]
    threads: ClassVar[list[str]]

    def compile(self, grammar: wire.Grammar) -> CompiledGrammar:
        self.threads.append(threading.current_thread().name)
        if grammar == HELD:
            self.begun.set()
            assert self.go.wait(30)
        if grammar == BUG:
            raise ZeroDivisionError("a bug of ours")
        return super().compile(grammar)


@pytest.fixture
def slow() -> type[Slow]:
    return type("SlowNow", (Slow,), {"go": threading.Event(), "begun": threading.Event(), "threads": []})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("staged") / "model", "qwen2")


def build(stages: int, slow: type[RankGrammars] = RankGrammars, num_pages: int = 64) -> Build:
    return Build(torch.float64, stages=stages, grammars=slow, num_pages=num_pages)


def asking(grammar: wire.Grammar | None, seed: int = 0, num_tokens: int = 12, epoch: int = 1) -> wire.Request:
    sampling = wire.Sampling(max_tokens=num_tokens, seed=seed, temperature=1.0, stop_token_ids=[EOS_ID], grammar=grammar)
    return wire.Request(id=f"r{seed}", epoch=epoch, prompt=[3 + seed, 7, 9], delivered=[], sampling=sampling)


def alone(folder: Path, asked: wire.Request) -> list[int]:
    return on_ranks(folder, [1], build(1), lambda runner: serve(runner, [asked], LIMITS))[0].tokens


@groups
def test_steps_go_on_while_the_drawer_compiles(folder: Path, slow: type[Slow], pods: list[int], stages: int) -> None:
    asked = {1: asking(HELD, 1), 2: asking(None, 2), 3: asking(OTHER, 3)}

    def work(runner: ModelRunner) -> dict[int, list[int]]:
        with Engine(limits=LIMITS, real=(runner, runner.grammars())) as engine:
            engine.send(wire.Submit(1, asked[1]))
            assert slow.begun.wait(30)
            engine.send(wire.Submit(2, asked[2]), wire.Submit(3, asked[3]))
            engine.until(2, 3)
            assert 1 not in engine.tokens, "no step has it yet"
            slow.go.set()
            engine.until(1)
            engine.send(wire.Submit(4, msgspec.structs.replace(asked[1], id="again")))
            engine.until(4)
            assert engine.tokens.pop(4) == engine.tokens[1]
            return engine.tokens

    tokens = on_ranks(folder, pods, build(stages, slow), work)
    assert tokens == {handle: alone(folder, one) for handle, one in asked.items()}
    assert len(slow.threads) == 2 and all(name.startswith("grammar") for name in slow.threads), "none in a step, none twice"


@groups
def test_burst_of_orders_waits_for_no_computing_rank(folder: Path, slow: type[Slow], pods: list[int], stages: int) -> None:
    """The drawer is held in a step, and takes no message meanwhile."""
    several = [wire.Grammar("regex", f"[a-{letter}]{{9}}") for letter in "bcdefgh"]

    def work(runner: ModelRunner) -> int:
        grammars = runner.grammars()
        assert grammars is not None
        held = asking(HELD, 1).sampling
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
        assert slow.begun.wait(30)
        found = [grammars.begin(grammar) for grammar in several]
        slow.go.set()
        assert len(runner.finish().tokens) == 1
        return sum(one.result(30) is not None for one in found)

    assert on_ranks(folder, pods, build(stages, slow), work) == len(several)


def test_sampling_rank_reports_an_unusable_grammar(folder: Path, slow: type[Slow], caplog: pytest.LogCaptureFixture) -> None:
    def work(runner: ModelRunner) -> dict[int, wire.Refused]:
        with Engine(limits=LIMITS, real=(runner, runner.grammars())) as engine:
            engine.send(
                wire.Submit(1, asking(BROKEN, 1, epoch=7)), wire.Submit(2, asking(BUG, 2)), wire.Submit(3, asking(OTHER, 3))
            )
            engine.until(1, 2, 3)
            assert engine.tokens[3]
            return engine.refused

    refused = on_ranks(folder, [2], build(2, slow), work)
    assert (refused[1].status, refused[1].epoch) == (400, 7) and "unclosed group" in refused[1].message
    assert refused[2].status == 500 and "see the log" in refused[2].message
    assert "a bug of ours" in caplog.text


def test_preempted_requests_hold_their_grammars_on_the_drawer(
    folder: Path, slow: type[Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More grammars than are kept for nobody, and so few pages that requests wait and start anew."""
    monkeypatch.setattr(module, "KEPT_GRAMMARS", 1)
    asked = {n: asking(wire.Grammar("regex", f"[a-{letter}]{{30}}"), n, 30) for n, letter in enumerate("bcdef")}

    def work(runner: ModelRunner) -> tuple[dict[int, list[int]], int]:
        with Engine(limits=LIMITS, real=(runner, runner.grammars())) as engine:
            engine.send(*(wire.Submit(handle, one) for handle, one in asked.items()))
            engine.until(*asked)
            engine.until_load(0, 0)
            return engine.tokens, engine.loads[-1].preemptions

    tokens, preemptions = on_ranks(folder, [2], build(2, slow, num_pages=8), work)
    assert preemptions > 0
    assert len(slow.threads) == len(asked) and all(name.startswith("grammar") for name in slow.threads)
    assert tokens == {handle: alone(folder, one) for handle, one in asked.items()}


class Known:
    """A compiler that has compiled what it was asked before."""

    def __init__(self) -> None:
        self.made: dict[str, str] = {}
        self.go = threading.Event()

    def kept(self, grammar: wire.Grammar) -> object | None:
        return self.made.get(grammar.text)

    def compile(self, grammar: wire.Grammar) -> object:
        if grammar.text == "bad":
            raise GrammarError("it is bad")
        if grammar.text == "late":
            assert self.go.wait(20)
        return self.made.setdefault(grammar.text, f"compiled {grammar.text}")


def test_sampling_rank_keeps_a_grammar_while_rank_0_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_GRAMMARS", 0)
    orders: list[CompileOrder] = []
    far = RemoteGrammars(orders.append)
    a, b = (wire.Grammar("regex", letter) for letter in "ab")
    first = far.begin(a)
    assert far.kept(a) is None and not first.cancel() and not first.done()
    far.hear(CompileResult(orders[0].number))
    held = first.result()
    assert far.kept(a) is held
    del held, first
    assert far.kept(a) is None
    second = far.begin(b)
    assert orders[1] == CompileOrder(orders[1].number, b, [orders[0].number])
    far.hear(CompileResult(orders[1].number, "no", is_bug=True))
    assert isinstance(second.exception(), RuntimeError)


def test_service_answers_each_order_once_before_its_end() -> None:
    answers: list[CompileResult] = []
    told = threading.Semaphore(0)

    def give(answer: CompileResult) -> None:
        answers.append(answer)
        told.release()

    compiler = Known()
    service = GrammarService(compiler, give)
    for number, text in enumerate(["a", "bad", "a"]):
        service.obey(CompileOrder(number, wire.Grammar("regex", text)))
        assert told.acquire(timeout=20)
    assert answers == [CompileResult(0), CompileResult(1, "it is bad"), CompileResult(2)]
    service.obey(CompileOrder(3, wire.Grammar("regex", "late")))
    service.close()
    compiler.go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("grammar"):
            thread.join(20)
    assert len(answers) == 3
    GrammarService(None, give).obey(CompileOrder(4, wire.Grammar("regex", "a")))
    assert "without grammars" in answers[-1].why


def test_drafting_rank_has_the_grammar_before_its_use() -> None:
    orders: list[CompileOrder] = []
    far, compiler = RemoteGrammars(orders.append), Known()
    both = BothGrammars(far, ThreadedGrammars(compiler))
    late, bad, soon = (wire.Grammar("regex", text) for text in ("late", "bad", "soon"))
    waiting, wrong, quick = both.begin(late), both.begin(bad), both.begin(soon)
    for order in orders:
        far.hear(CompileResult(order.number, "no" if order.grammar == bad else ""))
    assert isinstance(wrong.exception(20), GrammarError)
    assert quick.result(20) is not None and both.kept(soon) is not None
    assert not waiting.done() and both.kept(late) is None and not waiting.cancel()
    compiler.go.set()
    held = waiting.result(20)
    assert both.kept(late) == held
    both.close()
