"""A rank whose steps lack memory, and errors that end it."""

from pathlib import Path

import msgspec
import pytest
import torch

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.errors import StepOutOfMemory
from phalanx_runtime.rank.process.device_errors import device_exit
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank_spec import EXIT_DEVICE, EXIT_MEMORY
from tests.runtime.equality.requests import FIELDS, requests
from tests.runtime.lag import lagging
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import Served, serve
from tests.runtime.short_memory import WHY, ShortMemory
from tests.runtime.tiny import save_tiny

BUILD = Build(torch.float64, num_pages=80)
LIMITS = Limits(max_model_len=120, max_num_seqs=4, max_num_batched_tokens=48)
NCCL = "NCCL error in: Utils.cpp:94, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed."
NCCL_WHY = f"{NCCL} Last error: Cuda failure".replace("\n", " ")
NAMES = ["seeded", "penalties", "bias and words", "greedy with penalties"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("short") / "model", "qwen3")


def submitted() -> list[wire.Request]:
    by_name = dict(zip(FIELDS, requests(logprobs=None), strict=True))
    chosen = [by_name[name] for name in NAMES]
    return [msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, max_tokens=7)) for one in chosen]


def answers(folder: Path, memory: ShortMemory) -> list[Served]:
    def work(runner: ModelRunner) -> list[Served]:
        with memory:
            return serve(runner, submitted(), LIMITS)

    return on_ranks(folder, [1], BUILD, work)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return [one.tokens for one in answers(folder, ShortMemory("none"))]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("operator", ["aten::addmm_", "aten::argmax"], ids=["in the model", "while it samples"])
def test_lack_of_memory_in_a_step_changes_no_token(folder: Path, expected: list[list[int]], operator: str, lag: int) -> None:
    with lagging(0):
        whole = ShortMemory(operator)
        answers(folder, whole)
    for call in (1, whole.num_calls // 2, whole.num_calls - 1):
        memory = ShortMemory(operator, call)
        with lagging(lag):
            found = answers(folder, memory)
        assert memory.num_raised == 1 and [one.tokens for one in found] == expected


def test_second_lack_in_a_row_ends_the_rank(folder: Path) -> None:
    with pytest.raises(StepOutOfMemory) as caught:
        answers(folder, ShortMemory("aten::linear", 20, 21))
    assert str(caught.value).startswith("two steps in a row, the second with ") and str(caught.value).endswith(WHY)
    assert device_exit(caught.value) == (EXIT_MEMORY, str(caught.value))


def test_rank_with_peers_repeats_no_step(folder: Path) -> None:
    raised: list[type[Exception]] = []

    def work(runner: ModelRunner) -> None:
        try:
            with ShortMemory("aten::linear", 20):
                serve(runner, submitted(), LIMITS)
        except Exception as error:
            raised.append(type(error))
            raise

    with pytest.raises(RuntimeError):  # of one of the ranks, which are threads here
        on_ranks(folder, [2], BUILD, work)
    assert raised == [torch.OutOfMemoryError]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(f"{WHY} GPU 0 has ...\nadvice"), (EXIT_MEMORY, f"{WHY} GPU 0 has ...")),
        (
            torch.AcceleratorError("CUDA error: an illegal memory access\nadvice"),
            (EXIT_DEVICE, "CUDA error: an illegal memory access"),
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), (EXIT_DEVICE, "CUDA error: device-side assert triggered")),
        (RuntimeError("Triton Error [CUDA]: out of resources"), (EXIT_DEVICE, "Triton Error [CUDA]: out of resources")),
        (RuntimeError("Triton Error [CUDA]: out of memory"), (EXIT_MEMORY, "Triton Error [CUDA]: out of memory")),
        (RuntimeError("Triton Error [HIP]:  Code: 1, invalid"), (EXIT_DEVICE, "Triton Error [HIP]:  Code: 1, invalid")),
        (RuntimeError("HIP error: out of memory"), (EXIT_MEMORY, "HIP error: out of memory")),
        (torch.AcceleratorError("CUDA error: out of memory\nadvice"), (EXIT_MEMORY, "CUDA error: out of memory")),
        (
            RuntimeError(f"{NCCL}\nLast error:\nCuda failure 'misaligned address'"),
            (EXIT_DEVICE, f"{NCCL_WHY} 'misaligned address'"),
        ),
        (RuntimeError(f"{NCCL}\nLast error:\nCuda failure 2 'out of memory'"), (EXIT_MEMORY, f"{NCCL_WHY} 2 'out of memory'")),
        (RuntimeError("NCCL error in: Utils.cpp:94, remote process exited\nncclRemoteError: A call failed"), None),
        (RuntimeError("shapes cannot be multiplied"), None),
        (ValueError("CUDA error: not of torch"), None),
        (torch.OutOfMemoryError(), (EXIT_MEMORY, "OutOfMemoryError")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_device_errors_have_their_own_exit_codes(error: Exception, expected: tuple[int, str] | None) -> None:
    assert device_exit(error) == expected
