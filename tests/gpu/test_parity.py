"""The same decoder on a GPU: tokens of `transformers` in fp32, and of our own CPU run. NCCL has no test yet: it needs two GPUs.

One command: `pytest tests/gpu -m gpu`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx_api.engine_config import EngineConfig
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.rank.loader import load_rank
from phalanx_runtime.rank.process.cgroup import System
from phalanx_runtime.rank.sampling.gumbel import gumbel, noise_bits, noise_key
from phalanx_runtime.rank_spec import RankSpec
from tests.runtime.model.equal import Stream, compare
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks
from tests.runtime.tiny import FAMILIES, VOCAB_SIZE, Family, save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NUM_TOKENS = 32
LENGTHS = (1, 5, 17, 40, 100)


def prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB_SIZE, (size,), generator=chance).tolist() for size in LENGTHS]


@torch.inference_mode()
def reference(folder: Path, outputs: list[list[int]]) -> list[Stream]:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to("cuda").eval()
    streams = []
    for prompt, output in zip(prompts(), outputs, strict=True):
        logits = model(torch.tensor([prompt + output[:-1]], device="cuda"), use_cache=False).logits[0, len(prompt) - 1 :]
        best = logits.topk(2).values
        streams.append(Stream(logits.argmax(-1).tolist(), ((best[:, 0] - best[:, 1]) / logits.std(-1)).tolist()))
    return streams


def generate(folder: Path, build: Build, driver_requests: list[DriverRequest]) -> list[list[int]]:
    return on_ranks(folder, [1], build, lambda runner: Driver(runner).generate(driver_requests, NUM_TOKENS, chunk=30, lag=1))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_tokens_of_transformers_on_a_gpu(tmp_path: Path, family: Family) -> None:
    folder = save_tiny(tmp_path / "model", family)
    outputs = generate(folder, Build(device="cuda"), [DriverRequest(prompt) for prompt in prompts()])
    outcome = compare(reference(folder, outputs), outputs)
    assert outcome.holds, outcome


@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_samples_equal_cpu_in_float64(tmp_path: Path, family: Family) -> None:
    folder = save_tiny(tmp_path / "model", family)
    driver_requests = [DriverRequest(prompt, seed=i, temperature=0.8, top_p=0.95, top_k=50) for i, prompt in enumerate(prompts())]
    wide = {device: generate(folder, Build(torch.float64, device=device), driver_requests) for device in ("cpu", "cuda")}
    assert wide["cpu"] == wide["cuda"]


def test_noise_bits_are_the_same_on_a_gpu() -> None:
    keys = torch.tensor([noise_key(seed, 3) for seed in range(64)], dtype=torch.int32)
    tokens = torch.arange(50_000, dtype=torch.int32)
    assert torch.equal(noise_bits(keys, tokens), noise_bits(keys.cuda(), tokens.cuda()).cpu())
    torch.testing.assert_close(gumbel(keys, tokens, torch.float32), gumbel(keys.cuda(), tokens.cuda(), torch.float32).cpu())


def test_bf16_runs_and_a_dry_run_sizes_the_pool(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    spec = RankSpec(
        rank=0,
        world_size=1,
        local_world_size=1,
        local_rank=0,
        incarnation=1,
        hosts=["127.0.0.1"],
        base_port=0,
        token="00",
        model_dir=str(folder),
        engine=EngineConfig(dtype="bfloat16", gpu_memory_utilization=0.1),
    )
    runner, ready = load_rank(spec, SoloCollective(), torch.device("cuda", 0), System())
    assert ready.num_pages > 1000
    assert torch.cuda.memory_allocated() <= 0.1 * torch.cuda.get_device_properties(0).total_memory
    tokens = Driver(runner).generate([DriverRequest(prompts()[2])], 8)
    assert len(tokens[0]) == 8
