"""Reads and measures the machine."""

import itertools
import os
import shutil
import sysconfig
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from phalanx_runtime.doctor.verdicts import Device, Machine
from phalanx_runtime.model.kernels.folder import usable_folder
from phalanx_runtime.model.processor import BF16_FLAGS, choose_dtype, read_processor
from phalanx_runtime.rank.process.cgroup import System, cpu_limit, memory_limit, rank_threads
from phalanx_runtime.server.devices.nvml import open_devices
from phalanx_runtime.server.devices.readings import DeviceReading

MEASURE_S = 0.3
"""Shortest time of a measurement."""
CPU_COPY_BYTES, GPU_COPY_BYTES = 64 << 20, 1 << 30
"""More than the caches hold."""
CPU_MATMUL, GPU_MATMUL = 1024, 8192
"""Rows and columns."""
CPU = torch.device("cpu")


def read_machine(system: System) -> Machine:
    """Returns the machine's record. Takes a second, and one per device."""
    torch.set_num_threads(rank_threads(None, cpu_limit(system), 1))
    processor = read_processor()
    dtype = choose_dtype("auto", "bfloat16", CPU, processor)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    driver, readings = _read_driver(count)
    return Machine(
        processors=system.processors,
        cpus=cpu_limit(system),
        memory_bytes=memory_limit(system),
        shm_bytes=_shm_bytes(Path("/dev/shm")),
        vectors=vectors_of(processor.flags),
        dtype=str(dtype).removeprefix("torch."),
        copy_bytes_per_s=copy_rate(CPU, CPU_COPY_BYTES),
        matmul_flops_per_s=matmul_rate(CPU, CPU_MATMUL, dtype),
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        driver=driver,
        has_driver_files=Path("/dev/nvidiactl").exists(),
        nccl=_nccl_version() if count else "",
        can_compile=_can_compile(),
        devices=[_read_device(index, readings.get(index)) for index in range(count)],
        separated=[
            pair for pair in itertools.combinations(range(count), 2) if not torch.cuda.can_device_access_peer(pair[0], pair[1])
        ],
    )


def vectors_of(flags: frozenset[str]) -> list[str]:
    """Returns the vector extensions among the flags of a processor that kernels use."""
    found = {
        "avx2": "avx2" in flags,
        "avx512": "avx512f" in flags,
        "amx": "amx_tile" in flags,
        "neon": "asimd" in flags,
        "bf16": bool(flags & BF16_FLAGS),
    }
    return [name for name, exists in found.items() if exists]


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Returns the bytes read plus written per second by a copy."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of a square matrix product."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * float(size) ** 3 / _seconds(lambda: torch.mm(a, b), device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the time of one call, the least of two measurements."""

    def run(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) / times

    run(1)
    times = max(1, int(MEASURE_S / 2 / max(run(1), 1e-6)))
    return min(run(times), run(times))


def _shm_bytes(folder: Path) -> int:
    try:
        size = os.statvfs(folder)
    except OSError:
        return 0
    return size.f_frsize * size.f_blocks


def _can_compile() -> bool:
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return find_spec("triton") is not None and (usable_folder() is not None or (bool(compiler) and headers.exists()))


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _read_driver(num_devices: int) -> tuple[str, dict[int, DeviceReading]]:
    source = open_devices(num_devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if source is None:
        return "", {}
    try:
        return source.driver, {reading.index: reading for reading in source.read()}
    finally:
        source.close()


def _read_device(index: int, reading: DeviceReading | None) -> Device:
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    return Device(
        index=index,
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        copy_bytes_per_s=copy_rate(device, GPU_COPY_BYTES),
        matmul_flops_per_s=matmul_rate(device, GPU_MATMUL, torch.bfloat16),
        throttle=sorted(reading.throttle) if reading is not None else [],
        ecc_uncorrected=(reading.ecc_uncorrected or 0) if reading is not None else 0,
    )
