"""Threads and memory of a rank follow its cgroups (version 1 and 2), at most the machine's size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank.memory.kv_cache import MAX_CPU_POOL_BYTES, cpu_pool_bytes, pool_bytes, resolve_max_model_len
from phalanx_runtime.rank.process.cgroup import (
    OPENMP_SPINS,
    System,
    cpu_limit,
    limit_cached_kernels,
    limit_openmp_spin,
    memory_limit,
    rank_threads,
)

GIB = 1 << 30


def system(tmp_path: Path, own: str, files: dict[str, str]) -> System:
    for name, text in {"meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\n", "own": own, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return System(tmp_path / "cg", tmp_path / "own", tmp_path / "meminfo", processors=8)


V2 = "0::/kubepods/pod1\n"
V1 = "4:memory:/kubepods/pod1\n3:cpu,cpuacct:/kubepods/pod1\n"

CPU = {
    "v2": (V2, {"cg/kubepods/pod1/cpu.max": "150000 100000\n"}, 1.5),
    "v2 of the parent": (V2, {"cg/kubepods/cpu.max": "300000 100000", "cg/kubepods/pod1/cpu.max": "max 100000"}, 3.0),
    "v2 seen from inside a container": ("0::/\n", {"cg/cpu.max": "200000 100000\n"}, 2.0),
    "v1": (V1, {"cg/cpu/kubepods/pod1/cpu.cfs_quota_us": "50000", "cg/cpu/kubepods/pod1/cpu.cfs_period_us": "100000"}, 0.5),
    "v1 unlimited": (V1, {"cg/cpu/cpu.cfs_quota_us": "-1", "cg/cpu/cpu.cfs_period_us": "100000"}, 8.0),
    "more than the machine": (V2, {"cg/kubepods/pod1/cpu.max": "9900000 100000"}, 8.0),
    "no cgroup": ("", {}, 8.0),
}
MEMORY = {
    "v2": (V2, {"cg/kubepods/pod1/memory.max": f"{4 * GIB}\n"}, 4 * GIB),
    "v2 unlimited": (V2, {"cg/kubepods/pod1/memory.max": "max"}, 16 * GIB),
    "v1": (V1, {"cg/memory/kubepods/pod1/memory.limit_in_bytes": str(2 * GIB)}, 2 * GIB),
    "v1 unlimited": (V1, {"cg/memory/memory.limit_in_bytes": "9223372036854771712"}, 16 * GIB),
    "none": ("", {}, 16 * GIB),
}


@pytest.mark.parametrize(("own", "files", "limit"), CPU.values(), ids=CPU.keys())
def test_cpu_limit(tmp_path: Path, own: str, files: dict[str, str], limit: float) -> None:
    assert cpu_limit(system(tmp_path, own, files)) == limit


@pytest.mark.parametrize(("own", "files", "limit"), MEMORY.values(), ids=MEMORY.keys())
def test_memory_limit(tmp_path: Path, own: str, files: dict[str, str], limit: int) -> None:
    assert memory_limit(system(tmp_path, own, files)) == limit


def test_this_machine_has_limits() -> None:
    assert cpu_limit(System()) > 0
    assert 0 < memory_limit(System()) < 1 << 60


@pytest.mark.parametrize(
    ("num_threads", "limit", "ranks", "threads"),
    [(None, 8.0, 1, 8), (None, 8.0, 3, 2), (None, 1.5, 1, 1), (None, 0.5, 2, 1), (5, 2.0, 2, 5)],
    ids=["alone", "shared", "fraction", "less than one each", "set"],
)
def test_threads(num_threads: int | None, limit: float, ranks: int, threads: int) -> None:
    assert rank_threads(num_threads, limit, ranks) == threads


def test_pool_takes_its_memory_share_up_to_the_maximum() -> None:
    assert cpu_pool_bytes(100 * GIB, 1) == MAX_CPU_POOL_BYTES
    assert cpu_pool_bytes(100 * GIB, 2) == MAX_CPU_POOL_BYTES // 2
    assert cpu_pool_bytes(4 * GIB, 1) == int(0.3 * 4 * GIB)


@pytest.mark.parametrize(
    ("usable", "taken", "most", "expected"),
    [(10 * GIB, 2 * GIB, 4 * GIB, 4 * GIB), (10 * GIB, 8 * GIB, 4 * GIB, 2 * GIB), (10, 9, 20, 1)],
    ids=["maximum", "remaining memory", "little memory"],
)
def test_pool_takes_memory_left_by_weights_and_largest_step(usable: int, taken: int, most: int, expected: int) -> None:
    assert pool_bytes(usable, taken, most, "") == expected


def test_rank_without_memory_for_a_pool_names_the_remedy() -> None:
    with pytest.raises(ModelError, match=r"take 3072 MiB of 2048 MiB.*: raise the limit, or lower max_num_batched_tokens"):
        pool_bytes(2 * GIB, 3 * GIB, GIB, "raise the limit")


def test_longest_request_is_bounded_by_flag_model_and_pool() -> None:
    assert resolve_max_model_len(None, 100, 10, 16) == 100
    assert resolve_max_model_len(None, 1000, 10, 16) == 160
    assert resolve_max_model_len(64, 1000, 10, 16) == 64
    with pytest.raises(ModelError, match="max_model_len 161"):
        resolve_max_model_len(161, 1000, 10, 16)
    with pytest.raises(ModelError, match="kv_cache_memory_bytes"):
        resolve_max_model_len(None, 1000, 0, 16)


def test_threads_that_wait_sleep_soon() -> None:
    cgroup = "phalanx_runtime.rank.process.cgroup"
    program = f"import os; from {cgroup} import limit_openmp_spin; limit_openmp_spin(os.environ); import torch"
    environment = {**os.environ, "OMP_DISPLAY_ENV": "verbose"}
    environment.pop("GOMP_SPINCOUNT", None)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch uses another OpenMP")
    assert f"GOMP_SPINCOUNT = '{OPENMP_SPINS}'" in done.stderr


@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_how_threads_wait_can_be_chosen(chosen: dict[str, str]) -> None:
    environment = dict(chosen)
    limit_openmp_spin(environment)
    assert environment == chosen


ROWS_OF_ALL_NUMBERS = """
import ctypes, os
from phalanx_runtime.rank.process.cgroup import limit_cached_kernels
limit_cached_kernels(os.environ)
import torch
from phalanx_runtime.model.linear.linear import PackedLinear, can_pack

class Allocated(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena b c d mapped e f used g h".split()]

libc = ctypes.CDLL(None)
if not can_pack(torch.float32) or not hasattr(libc, "mallinfo2"):
    raise SystemExit(3)
libc.mallinfo2.restype = Allocated
linear, used = PackedLinear(torch.zeros(32, 32), None), []
for rows in range(1, 601):
    linear(torch.zeros(rows, 32))
    if rows in (300, 600):
        used.append(libc.mallinfo2().used)
print(used[1] - used[0])
"""


def test_cached_kernels_of_linears_are_bounded() -> None:
    environment = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    done = subprocess.run([sys.executable, "-c", ROWS_OF_ALL_NUMBERS], env=environment, capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip("oneDNN packs no linear here, or libc does not count")
    assert int(done.stdout) < 20 << 20, "300 kernels took 180 MiB"


def test_number_of_cached_kernels_can_be_chosen() -> None:
    environment = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7", "LRU_CACHE_CAPACITY": "8"}
    limit_cached_kernels(environment)
    assert environment == {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7", "LRU_CACHE_CAPACITY": "8"}
