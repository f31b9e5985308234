"""The search: hypothesis chooses the steps of a world, and shortens those of a counterexample.

run     looks for a counterexample with a fixed seed; returns its script and the violated invariant
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.control.search import ends, steps
from tests.control.search.history import Script
from tests.control.search.world import SearchWorld

STEPS = 25
"""Longest script."""
COLLECT_WORLDS = 10
"""Worlds between two garbage collections. With the default thresholds, collections take a tenth of the time."""
Number = st.SearchStrategy[int]


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A script, and what it violates."""

    script: Script
    violation: str


@dataclass(slots=True)
class Tally:
    """Worlds of a search, and the last failing one: the shortest, as hypothesis ends with it."""

    worlds: int = 0
    looks: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    failure: Counterexample | None = None


def _step(name: str, *arguments: Number) -> Callable[..., None]:
    """Returns a rule that takes this step."""

    def take(self: "SearchMachine", **drawn: int) -> None:
        self.take(name, tuple(drawn.values()))

    take.__name__ = name
    make: Any = rule  # its overloads know no mapping
    wrapped: Callable[..., None] = make(**{f"a{index}": argument for index, argument in enumerate(arguments)})(take)
    return wrapped


ANY, BIT, FEW = st.integers(0, 7), st.integers(0, 1), st.integers(0, 3)


class SearchMachine(RuleBasedStateMachine):
    """A world and its script."""

    tally = Tally()

    def __init__(self) -> None:
        super().__init__()
        self.world: SearchWorld | None = None
        self.script = Script((1, 0, 1, 20, 0))

    @initialize(
        replicas=st.integers(1, 4),
        strategy=st.integers(0, 5),
        pods=st.integers(1, 2),
        start_s=st.sampled_from((20, 100)),
        flags=st.integers(0, 15),
    )
    def begin(self, replicas: int, strategy: int, pods: int, start_s: int, flags: int) -> None:
        self.script = Script((replicas, strategy, pods, start_s, flags))
        self.world = self.guard(lambda: steps.begin(self.script.start))
        self.take("wait", (5,))

    def take(self, name: str, arguments: tuple[int, ...]) -> None:
        world = self.world
        assert world is not None
        self.script = Script(self.script.start, (*self.script.steps, (name, arguments)))
        self.guard(lambda: steps.take(world, name, arguments))

    def teardown(self) -> None:
        world, self.world = self.world, None
        if world is not None:
            self.guard(lambda: ends.finish(world))
            self.tally.worlds += 1
            self.tally.looks += len(world.looks)
            self.tally.virtual_s += world.t
        if self.tally.worlds % COLLECT_WORLDS == 0:
            gc.collect()

    def guard(self, act: Callable[[], Any]) -> Any:
        """Records the script of a failure. Any exception is one: the operator must answer every state."""
        try:
            return act()
        except Exception as error:
            self.world = None  # no end is checked
            self.tally.failure = Counterexample(self.script, f"{type(error).__name__}: {error}")
            raise

    # Users.
    scale = _step("scale", st.integers(0, 4))
    rollout = _step("rollout", FEW)
    restart_id = _step("restart_id", FEW)
    pause = _step("pause", BIT)
    partition = _step("partition", st.integers(0, 2))
    strategy = _step("strategy", st.integers(0, 5))
    suspend = _step("suspend", BIT)
    invalid = _step("invalid", BIT)
    delete = _step("delete", BIT)
    recreate = _step("recreate", st.integers(0, 3))
    ask_drain = _step("ask_drain", FEW, BIT)
    annotate = _step("annotate", FEW, FEW)
    autoscale = _step("autoscale", st.integers(0, 5))
    load = _step("load", st.integers(0, 5))
    load_one = _step("load_one", BIT, st.integers(0, 5))
    neighbour = _step("neighbour", st.integers(0, 2))
    meddle = _step("meddle", BIT, st.integers(0, 5))
    delete_group = _step("delete_group", FEW)
    # Nodes and pods.
    cut = _step("cut", ANY)
    cut_many = _step("cut_many", st.integers(1, 63))
    kill_node = _step("kill_node", ANY)
    return_node = _step("return_node", ANY)
    return_all = _step("return_all")
    delete_node = _step("delete_node", ANY)
    cordon = _step("cordon", ANY, BIT)
    hang = _step("hang", ANY, BIT)
    refuse = _step("refuse", ANY, BIT)
    fail = _step("fail", FEW, FEW)
    delete_pod = _step("delete_pod", ANY)
    die = _step("die", FEW)
    delete_router = _step("delete_router", BIT)
    slow_exit = _step("slow_exit", BIT)
    late_controller = _step("late_controller", BIT)
    late_kubelets = _step("late_kubelets", BIT)
    # Routers.
    router_mode = _step("router_mode", BIT, st.integers(0, 2))
    unlink = _step("unlink", BIT, FEW)
    streams = _step("streams", st.integers(1, 3))
    end_streams = _step("end_streams")
    pin = _step("pin", BIT)
    # Time, operators, and their calls and watches.
    wait = _step("wait", ANY)
    wait_more = _step("wait", ANY)
    look = _step("look", BIT)
    late_watch = _step("late_watch", BIT, st.integers(0, 5))
    deliver = _step("deliver", BIT, st.integers(0, 5), st.integers(1, 9))
    relist = _step("relist", BIT, st.integers(0, 5), FEW)
    fail_call = _step("fail_call", BIT, st.integers(1, 6), FEW)
    fail_read = _step("fail_read", BIT, st.integers(1, 3))
    interrupt = _step("interrupt", st.integers(1, 4), st.integers(0, 5), FEW)
    second_leader = _step("second_leader")
    one_leader = _step("one_leader")
    restart = _step("restart")
    skew = _step("skew", BIT, st.integers(0, 5))


def run(seed: int, worlds: int, *, shorten: bool = True, step_count: int = STEPS) -> Tally:
    """Searches up to this many worlds; ends at the first counterexample, shortened if wanted."""
    tally, wall_s, cpu_s = Tally(), time.monotonic(), time.process_time()

    class SeededMachine(SearchMachine):
        pass

    SeededMachine.tally = tally
    phases = [Phase.generate, Phase.shrink] if shorten else [Phase.generate]
    options = settings(
        max_examples=worlds,
        stateful_step_count=step_count,
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    log = logging.getLogger("phalanx_operator")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with _collected_by_worlds():
            run_state_machine_as_test(hypothesis.seed(seed)(SeededMachine), settings=options)
    except Exception:
        if tally.failure is None:
            raise
    finally:
        log.setLevel(level)
        tally.wall_s, tally.cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
    return tally


@contextmanager
def _collected_by_worlds() -> Iterator[None]:
    """Leaves the garbage collector to `teardown`, which ignores what was there before."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
