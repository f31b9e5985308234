"""Tokens on a GPU: those of `transformers` in fp32, and those of our own CPU run with keyed noise."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from phalanx_api import wire
from phalanx_api.engine_config import EngineConfig
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.rank.device.device_step import DeviceStep
from phalanx_runtime.rank.loader import load_rank
from phalanx_runtime.rank.process.cgroup import System
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.sampling.gumbel import gumbel, noise_bits, noise_key
from phalanx_runtime.rank_spec import RankSpec
from tests.gpu.places import GPU, Place, device_step
from tests.runtime.lag import lagging
from tests.runtime.model.equal import Stream, compare
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks
from tests.runtime.served import Served, serve
from tests.runtime.tiny import FAMILIES, VOCAB_SIZE, Family

Models = Callable[[Family, Place], Path]
LENGTHS = (1, 5, 17, 40, 100)
ON_BOTH: list[Any] = ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES if one != "llama")]
"""On a CPU the interpreter takes its time."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cache(lambda family, place: place.save_model(tmp_path_factory.mktemp(family) / "model", family))


def prompts(place: Place) -> list[list[int]]:
    chance = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB_SIZE, (size,), generator=chance).tolist() for size in LENGTHS[: place.rows]]


@torch.inference_mode()
def reference(folder: Path, place: Place, outputs: list[list[int]]) -> list[Stream]:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(place.device).eval()
    streams = []
    for prompt, output in zip(prompts(place), outputs, strict=True):
        tokens = torch.tensor([prompt + output[:-1]], device=place.device)
        logits = model(tokens, use_cache=False).logits[0, len(prompt) - 1 :]
        best = logits.topk(2).values
        streams.append(Stream(logits.argmax(-1).tolist(), ((best[:, 0] - best[:, 1]) / logits.std(-1)).tolist()))
    return streams


def generate(folder: Path, build: Build, driver_requests: list[DriverRequest], num_tokens: int) -> list[list[int]]:
    def work(runner: ModelRunner) -> list[list[int]]:
        outputs = Driver(runner).generate(driver_requests, num_tokens, chunk=30, lag=1)
        assert not build.device_rows or device_step(runner).num_launched > 0
        return outputs

    return on_ranks(folder, [1], build, work)


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize("family", ON_BOTH)
def test_families_give_the_tokens_of_transformers(models: Models, place: Place, family: Family, path: str) -> None:
    folder = models(family, place)
    build = place.host() if path == "host" else place.device_path()
    outputs = generate(folder, build, [DriverRequest(prompt) for prompt in prompts(place)], place.num_tokens)
    outcome = compare(reference(folder, place, outputs), outputs)
    assert outcome.holds, outcome


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("family", ON_BOTH)
def test_the_device_path_samples_the_tokens_of_a_cpu(models: Models, place: Place, family: Family, lag: int) -> None:
    """By the engine, in fp32, near-ties aside. The CPU's run has the gaps."""
    folder, submitted = models(family, place), place.requests()
    with_gaps = [_with_gaps(one) for one in submitted]
    alone = SchedulerConfig(prefix_caching=False)

    def on_cpu(runner: ModelRunner) -> list[Served]:
        return serve(runner, with_gaps, place.limits, alone)

    def on_device(runner: ModelRunner) -> list[Served]:
        served, step = serve(runner, submitted, place.limits, alone), device_step(runner)
        assert step.num_launched > 0 and not step.obstacles
        return served

    with lagging(0):
        expected = on_ranks(folder, [1], replace(place.host(), device="cpu"), on_cpu)
    with lagging(lag):
        found = on_ranks(folder, [1], place.device_path(), on_device)
    streams = [Stream(one.tokens, [detail.gap or 0.0 for detail in one.details if detail is not None]) for one in expected]
    assert all(len(stream.gaps) == len(stream.tokens) for stream in streams)
    outcome = compare(streams, [one.tokens for one in found])
    assert outcome.holds, outcome


def _with_gaps(request: wire.Request) -> wire.Request:
    return structs.replace(request, sampling=structs.replace(request.sampling, return_gaps=True))


@pytest.mark.parametrize("family", ON_BOTH)
def test_host_samples_equal_a_cpu_in_float64(models: Models, place: Place, family: Family) -> None:
    folder = models(family, place)
    driver_requests = [
        DriverRequest(prompt, seed=seed, temperature=0.8, top_p=0.95, top_k=50) for seed, prompt in enumerate(prompts(place))
    ]
    build = place.host(dtype=torch.float64)
    found, expected = (generate(folder, one, driver_requests, place.num_tokens) for one in (build, replace(build, device="cpu")))
    assert found == expected


def test_noise_bits_are_those_of_a_cpu(place: Place) -> None:
    keys = torch.tensor([noise_key(seed, 3) for seed in range(64)], dtype=torch.int32)
    tokens = torch.arange(50_000 if place is GPU else 500, dtype=torch.int32)
    there = (keys.to(place.device), tokens.to(place.device))
    assert torch.equal(noise_bits(keys, tokens), noise_bits(*there).cpu())
    torch.testing.assert_close(gumbel(keys, tokens, torch.float32), gumbel(*there, torch.float32).cpu())


def utilization_by_this_process(share: float) -> float:
    """Returns the `gpu_memory_utilization` that leaves this share to this process, beside the memory of others."""
    if not torch.cuda.is_available():
        return share
    free, total = torch.cuda.mem_get_info()
    return min(1.0, share + (total - free - torch.cuda.memory_reserved()) / total)


@pytest.mark.xdist_group("pool of the whole GPU")  # by `--dist loadgroup`: two at a time take each other's memory
@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_a_loaded_rank_sizes_its_pool(models: Models, place: Place, is_eager: bool) -> None:
    settings = EngineConfig(
        dtype="bfloat16",
        gpu_memory_utilization=utilization_by_this_process(0.1),
        kv_cache_memory_bytes=None if place is GPU else 1 << 24,
        enforce_eager=is_eager,
    )
    spec = RankSpec(
        rank=0,
        world_size=1,
        local_world_size=1,
        local_rank=0,
        incarnation=1,
        hosts=["127.0.0.1"],
        base_port=0,
        token="00",
        model_dir=str(models("llama", place)),
        engine=settings,
    )
    device = torch.device("cuda", 0) if place is GPU else torch.device("cpu")
    runner, ready = load_rank(spec, SoloCollective(), device, System())
    assert ready.num_pages > 1000
    assert isinstance(runner.device_step, DeviceStep) is (place is GPU and not is_eager)
    if place is GPU:
        assert torch.cuda.memory_allocated() <= settings.gpu_memory_utilization * torch.cuda.get_device_properties(0).total_memory
    tokens = Driver(runner).generate([DriverRequest(prompts(place)[-1])], 8)
    assert len(tokens[0]) == 8
