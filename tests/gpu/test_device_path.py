"""The device path gives the tokens of the host path: graphs and eager steps, any lag, preemption, draft tokens, moves."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bench.moves.mover import Mover
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.rank.memory.page_memory import await_steps, open_pages
from phalanx_runtime.rank.runner import ModelRunner
from tests.gpu.places import Place, device_step, limited
from tests.polling import wait_until
from tests.runtime.drafts import save_draft, save_target
from tests.runtime.equality.requests import repeating
from tests.runtime.lag import lagging
from tests.runtime.moving_engines import LIMITS, Group, running_group
from tests.runtime.moving_requests import KINDS, MODES, make_request, moved_back_and_forth, undisturbed
from tests.runtime.rank.drafting.draft_runs import make_config
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.tiny import Family

NGRAMS = SchedulerConfig(speculation=SpeculationConfig(method="ngram", num_tokens=3, is_adaptive=False))
PLAIN = SchedulerConfig()


def tokens_of(served: list[Served]) -> list[list[int]]:
    assert all(one.refused is None for one in served)
    return [one.tokens for one in served]


@pytest.mark.slow  # the interpreter takes its time
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_graphs_sample_the_tokens_of_eager_steps(
    tmp_path: Path, place: Place, family: Family, lag: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder, submitted = place.save_model(tmp_path / "model", family), place.requests()

    def on_host(runner: ModelRunner) -> list[list[int]]:
        return tokens_of(serve(runner, submitted, place.limits))

    def by_graphs(runner: ModelRunner) -> list[list[int]]:
        found, step = on_host(runner), device_step(runner)
        assert step.account.shortage == "", [(one.getMessage(), vars(one).get("why")) for one in caplog.records]
        assert step.graphs.num_replays.total() > 0 and not step.obstacles
        assert step.account.num_bytes > 0 or place.device == "cpu"
        return found

    def eager(runner: ModelRunner) -> list[list[int]]:
        found, step = on_host(runner), device_step(runner)
        assert step.graph_obstacles["size"] > 0 and not step.graphs.num_replays
        return found

    with lagging(0):
        expected = on_ranks(folder, [1], place.host(), on_host)
    with lagging(lag):
        assert on_ranks(folder, [1], place.device_path(), by_graphs) == expected
        assert on_ranks(folder, [1], place.device_path(has_graphs=False), eager) == expected


@pytest.mark.slow  # the interpreter takes its time
def test_preempted_requests_continue_on_the_device(tmp_path: Path, place: Place) -> None:
    folder = place.save_model(tmp_path / "model")
    submitted = [msgspec.structs.replace(limited(one, 12), prompt=(one.prompt * 9)[:22]) for one in place.requests()]
    limits = Limits(max_model_len=40, max_num_seqs=place.rows, max_num_batched_tokens=64)

    def work(runner: ModelRunner) -> tuple[list[list[int]], int]:
        counter = CountingRunner(runner)
        return tokens_of(serve(counter, submitted, limits)), len(counter.admitted)

    expected, _ = on_ranks(folder, [1], place.host(), work)
    with lagging(1):
        found, num_admitted = on_ranks(folder, [1], place.device_path(num_pages=7), work)
    assert found == expected
    assert num_admitted > len(submitted), "requests were preempted"


def speculated(folder: Path, build: Build, place: Place, config: SchedulerConfig) -> tuple[list[list[int]], int]:
    """Serves repeating requests; returns their tokens and the number of accepted draft tokens."""

    def work(runner: ModelRunner) -> tuple[list[list[int]], int]:
        counter = CountingRunner(runner)
        limits = Limits(max_model_len=120, max_num_seqs=place.rows, max_num_batched_tokens=64)
        changed = [
            limited(
                msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, logprobs=None)),
                4 + 2 * place.num_tokens,
            )
            for one in repeating()[: place.rows]
            if one.sampling.grammar is None
        ]
        return tokens_of(serve(counter, changed, limits, config)), counter.num_accepted

    return on_ranks(folder, [1], build, work)


@pytest.mark.slow
def test_ngram_drafts_are_verified_on_the_device(tmp_path: Path, place: Place) -> None:
    folder = place.save_model(tmp_path / "model", "qwen3")
    expected, _ = speculated(folder, place.host(), place, PLAIN)
    found, num_accepted = speculated(folder, place.device_path(), place, NGRAMS)
    assert found == expected
    assert num_accepted > 0


@pytest.mark.slow
def test_a_draft_model_drafts_beside_the_device_path(tmp_path: Path, place: Place) -> None:
    folder = save_target(tmp_path / "model")
    draft: dict[str, Any] = {"speculative_method": "draft", "draft_dir": str(save_draft(folder, tmp_path / "draft"))}
    expected, _ = speculated(folder, place.host(), place, PLAIN)
    build = replace(place.device_path(), speculative=draft)
    found, num_accepted = speculated(folder, build, place, make_config("draft"))
    assert found == expected
    assert num_accepted > 0


def test_pages_are_copied_while_a_step_computes(place: Place) -> None:
    if place.device == "cpu":
        pytest.skip("steps of a CPU are not queued")
    device, page = torch.device(place.device), (torch.arange(2 * 8 * 16 * 64) % 251).to(torch.uint8)
    pages = open_pages([LayerCache(*torch.zeros(2, 4, 8, 16, 64, dtype=torch.uint8, device=device))])
    computed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    busy = torch.ones(8192, 8192, device=device)
    for _ in range(64):  # about a second
        busy = busy @ busy
    computed.record()
    pages.write(3, memoryview(page.numpy().data))
    assert b"".join(pages.read(3)) == page.numpy().tobytes()
    assert not computed.query()
    await_steps(device)
    assert computed.query()


@contextmanager
def two_groups(folder: Path, build: Build, limits: Limits) -> Iterator[tuple[list[Group], Mover]]:
    """Runs two groups on one device. The second captures its graphs after the first one did."""
    with ExitStack() as stack:
        groups = list[Group]()
        for _ in range(2):
            group = stack.enter_context(running_group(folder, [1], build, limits))
            wait_until(lambda group=group: group.loop is not None or group.channel.errors)  # type: ignore[misc]
            groups.append(group)
        yield groups, Mover([group.channel for group in groups])


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_moved_requests_keep_their_tokens(tmp_path: Path, place: Place, lag: int) -> None:
    folder, is_small = place.save_model(tmp_path / "model"), place.device == "cpu"
    kinds = {"seeded": KINDS["seeded"]} if is_small else KINDS
    more = {"max_tokens": 14} if is_small else {}
    limits = replace(LIMITS, max_num_seqs=place.rows)
    with lagging(lag), two_groups(folder, place.device_path(num_pages=120), limits) as (groups, router):
        requests = [make_request(kind, **sampling, **more) for kind, sampling in kinds.items()]
        plain = undisturbed(router, requests)
        assert moved_back_and_forth(router, requests, plain, MODES[:1] if is_small else MODES) > 0
        assert all(device_step(group.runners[0]).num_launched > 0 for group in groups)
