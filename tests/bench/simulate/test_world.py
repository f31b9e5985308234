"""The simulated fleet serves every request completely, accounts for its pages, and steps like a plain loop over requests."""

import json
import random
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.frame.figures import half_interval
from bench.router.replay import Arrival
from bench.simulate.__main__ import main
from bench.simulate.cache import PAGE
from bench.simulate.engine import Engine, Shape
from bench.simulate.figures import Figures, alone_s, figures
from bench.simulate.jobs import Job
from bench.simulate.machines import ANALYTIC
from bench.simulate.plots import PANELS, WIDTH, chart
from bench.simulate.policy import Policy
from bench.simulate.traffic import reasoning, shifted
from bench.simulate.workloads import POLICIES
from bench.simulate.world import Setting, World
from phalanx_api.cost import StepModel, StepWork
from tests.slow_cases import some

SMALL = Shape(ANALYTIC, total_pages=900, max_num_batched_tokens=256)


def played(policy: Policy, arrivals: list[Arrival], shape: Shape, groups: int = 8) -> World:
    """Returns the world after all requests ended, when no page is in use."""
    world = World(Setting(groups, shape), policy, arrivals)
    world.run()
    for engine in world.engines:
        assert (engine.pages.own, engine.pages.used, engine.pages.reserved, engine.context_tokens) == (0, 0, 0, 0)
        assert not engine.has_work
    return world


def shared_prefixes(count: int, seed: int) -> list[Arrival]:
    """Returns prompts that start with one of three runs of blocks."""
    rng = random.Random(seed)
    arrivals, at_s = [], 0.0
    for number in range(count):
        at_s += rng.expovariate(4.0)
        first = rng.randrange(3)
        blocks = (*range(10 * first, 10 * first + rng.randrange(1, 5)), 1000 + number)
        arrivals.append(Arrival(at_s, 512 * len(blocks) - rng.randrange(500), rng.randrange(1, 200), blocks))
    return arrivals


@pytest.mark.parametrize("name", some(POLICIES, *[*POLICIES][:2]))
def test_every_policy_serves_every_request_wholly(name: str) -> None:
    bursts = played(POLICIES[name](SMALL, 8), reasoning(5.0, 150, random.Random(1)), SMALL)
    result = figures(bursts, SMALL)
    assert result.preemptions > 0 or result.moves > 0
    large = Shape(ANALYTIC, total_pages=4000)
    assert figures(played(POLICIES[name](large, 8), shared_prefixes(150, 2), large), large).hit_share > 0.2


@pytest.mark.slow
def test_ours_moves_where_pages_are_scarce() -> None:
    arrivals = reasoning(5.0, 120, random.Random(3))
    world = played(POLICIES["phalanx"](SMALL, 8), arrivals, SMALL)
    assert world.counts.moves > 0
    still = played(POLICIES["phalanx, no moves"](SMALL, 8), arrivals, SMALL)
    assert still.counts.moves == 0
    assert figures(world, SMALL).preemptions < figures(still, SMALL).preemptions


class PlainEngine:
    """The slow twin: computes every token of every request, with unlimited pages."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.jobs: list[tuple[Job, list[float]]] = []
        self.computed: dict[int, int] = {}

    def step(self, now: float) -> float | None:
        """Returns the end of the step that starts now; `None` without work."""
        live = [(job, times) for job, times in self.jobs if len(times) < job.output_tokens]
        if not live:
            return None
        decodes = [(job, times) for job, times in live if times]
        budget = self.shape.max_num_batched_tokens - len(decodes)
        chunks = []
        prompts = [(job, times, job.prompt_tokens - self.computed[job.number]) for job, times in live if not times]
        half = (budget + 1) // 2 if len(prompts) > 1 else budget
        whole = budget
        for job, times, missing in prompts:
            if budget > 0:
                count = min(budget, missing if missing <= whole else half)
                budget -= count
                chunks.append((job, times, count))
        for place, (job, times, count) in enumerate(chunks):
            more = min(budget, job.prompt_tokens - self.computed[job.number] - count)
            chunks[place] = job, times, count + more
            budget -= more
        context = sum(job.prompt_tokens + len(times) - 1 for job, times in decodes)
        context += sum(self.computed[job.number] for job, _, _ in chunks)
        attended = sum(count * (self.computed[job.number] + count / 2) for job, _, count in chunks)
        prompt = sum(count for _, _, count in chunks)
        end = now + self.shape.model.predict(StepWork(prompt, len(decodes), context, attended))
        for _, times in decodes:
            times.append(end)
        for job, times, count in chunks:
            self.computed[job.number] += count
            if self.computed[job.number] == job.prompt_tokens:
                times.append(end)
        return end


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 700), st.integers(1, 60)), min_size=1, max_size=12))
@example([(1, 1), (384, 1), (128, 1)])  # in the second step the last one has no chunk
def test_steps_are_those_of_a_plain_loop(sizes: list[tuple[int, int]]) -> None:
    shape = Shape(ANALYTIC, total_pages=10_000, max_num_batched_tokens=256)
    jobs = [Job(number, 0.0, prompt, output) for number, (prompt, output) in enumerate(sizes)]
    plain, engine, now, plain_now = PlainEngine(shape), Engine("g", shape, 512), 0.0, 0.0
    for job in jobs:
        plain.jobs.append((job, []))
        plain.computed[job.number] = 0
        engine.submit(job)
    most = 0
    while engine.has_work:
        end = plain.step(plain_now)
        now += engine.start_step()
        engine.finish_step(now)
        assert end == pytest.approx(now)
        plain_now = now
        most = max(most, engine.pages.used)
    assert plain.step(now) is None
    assert most <= sum(-(-(prompt + output) // PAGE) for prompt, output in sizes)
    for job, times in plain.jobs:
        assert job.generated == len(times)
        assert [job.first_s, job.last_s] == pytest.approx([times[0], times[-1]])
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert job.longest_gap_s == pytest.approx(max(gaps, default=0.0))


@pytest.mark.parametrize("prompt", [1, 100, 256, 257, 2000])
def test_latency_alone_equals_latency_in_an_empty_group(prompt: int) -> None:
    """The bound of goodput is a multiple of it, for any costs."""
    every = StepModel(fixed_s=0.003, token_s=1e-4, knee_tokens=8, context_s=1e-7, attention_s=5e-8, row_s=1e-4, prompt_s=0.004)
    shape = Shape(every, total_pages=10_000, max_num_batched_tokens=256)
    engine, job, now = Engine("g", shape, 512), Job(0, 0.0, prompt, 1), 0.0
    engine.submit(job)
    while engine.has_work:
        now += engine.start_step()
        engine.finish_step(now)
    assert job.first_s == pytest.approx(alone_s(prompt, shape))


def test_the_command_prints_tables_and_relations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{i // 10:02d}.{i % 10}00000,{100 + i},{20 + i % 7}" for i in range(400)]
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text("\n".join(lines) + "\n")
    trace = [
        {"timestamp": 3000 * (i // 5), "input_length": 1500, "output_length": 30, "hash_ids": [0, i % 9, 100 + i]}
        for i in range(300)
    ]
    (tmp_path / "mooncake_conversation_trace.jsonl").write_text("".join(json.dumps(one) + "\n" for one in trace))
    out = tmp_path / "out.json"
    arguments = [
        "--traces",
        str(tmp_path),
        "--quick",
        "--workloads",
        "ABDE",
        "--out",
        str(out),
        "--plots",
        str(tmp_path / "plots"),
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for name in POLICIES:
        assert f"| {name} |" in printed
    assert "A: goodput against Llumnix, at least" in printed and "B: goodput against the best of 8, at least" in printed
    assert set(json.loads(out.read_text())["workloads"]) == set("ABDE")
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["A.svg", "B.svg", "D.svg", "E.svg"]


def test_chart_has_a_bar_per_policy_and_figure() -> None:
    def of(goodput: float) -> Figures:
        return Figures(goodput, 0.1, 1.0, 0.1, 0.2, 3, 0, 0.0, 0, 0, 0, 0.0, 1.0)

    drawn = ElementTree.fromstring(chart("X", {"a < b": [of(0.4), of(0.6)], "phalanx": [of(1.0), of(1.0)]}))
    bars = [one for one in drawn.iter("{http://www.w3.org/2000/svg}rect") if one.get("fill") != "white"]
    assert len(bars) == 2 * len(PANELS)
    shorter, longer = float(bars[0].get("width", "")), float(bars[1].get("width", ""))
    half = half_interval([40.0, 60.0])
    assert shorter / longer == pytest.approx(0.5, abs=1e-3) and longer == pytest.approx(WIDTH * 100 / (50 + half), abs=0.1)
    words = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "phalanx", "goodput %", "50.0", "100.0"} <= set(words)


def test_seed_selects_a_trace_part_that_starts_at_zero() -> None:
    trace = [Arrival(float(i), i + 1, 1) for i in range(100)]
    assert shifted(trace, 0, 0.1, 100) == trace[:10]
    for seed in range(1, 6):
        part = shifted(trace, seed, 1.0, 100)
        assert part[0].at_s == 0 and len(part) == 100
        assert sorted(one.input_tokens for one in part) == list(range(1, 101))
        assert all(a.at_s <= b.at_s for a, b in pairwise(part))
