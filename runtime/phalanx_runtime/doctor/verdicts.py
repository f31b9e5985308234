"""What the doctor reads from a machine, and its verdicts: one per check. Pure."""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from phalanx_api.roofline import product_rates

RATE_SHARE = 0.85
"""Least share of the product's rate."""
MIN_SHM_BYTES = 256 << 20
"""More than the 64 MiB that containers get by default."""
AVX2, AVX512, BF16 = "avx2", "avx512", "bf16"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, with measured rates."""

    index: int
    name: str
    """Product."""
    capability: tuple[int, int]
    memory_bytes: int
    copy_bytes_per_s: float
    matmul_flops_per_s: float
    """bf16."""
    throttle: list[str] = []
    """Present reasons for reduced clocks."""
    ecc_uncorrected: int = 0


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One machine or pod."""

    processors: int
    """In the affinity mask."""
    cpus: float
    """CPU limit of the cgroup, at most `processors`."""
    memory_bytes: int
    """Memory limit of the cgroup, at most the machine's memory."""
    shm_bytes: int
    """Size of /dev/shm; 0 if it does not exist."""
    vectors: list[str]
    """Vector extensions that the kernels use."""
    dtype: str
    """In which CPU ranks compute by default."""
    copy_bytes_per_s: float
    """Of the processors."""
    matmul_flops_per_s: float
    """Of the processors, in `dtype`."""
    torch: str
    cuda: str = ""
    """CUDA version that torch was built for; empty for a CPU build."""
    driver: str = ""
    """Version of NVIDIA's driver; empty without NVML."""
    has_driver_files: bool = False
    """The machine has /dev/nvidiactl."""
    nccl: str = ""
    can_compile: bool = True
    """Triton exists, with the image's compiled kernels or with a C compiler and Python's headers."""
    devices: list[Device] = []
    separated: list[tuple[int, int]] = []
    """Pairs of devices without peer access."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one check."""

    check: str
    value: str
    status: Literal["ok", "slow", "broken"] = "ok"
    reason: str = ""
    """Why it is slow or broken."""
    change: str = ""
    """What to change."""


def judge(machine: Machine) -> list[Verdict]:
    """Returns the verdicts of all checks that apply to a machine."""
    return [verdict for check in _CHECKS for verdict in check(machine)]


def _processors(machine: Machine) -> list[Verdict]:
    value = f"{machine.cpus:g} of {machine.processors} CPUs"
    needed = 1 + len(machine.devices)
    if machine.cpus < needed:
        reason = f"the HTTP process and {max(1, len(machine.devices))} rank processes share {machine.cpus:g} CPUs"
        change = f"give the pod {needed} CPUs or more"
        return [Verdict(check="processors", value=value, status="slow", reason=reason, change=change)]
    return [Verdict(check="processors", value=value)]


def _memory(machine: Machine) -> list[Verdict]:
    return [Verdict(check="memory", value=f"{machine.memory_bytes / 2**30:.1f} GiB")]


def _shared_memory(machine: Machine) -> list[Verdict]:
    value = f"{machine.shm_bytes / 2**20:,.0f} MiB"
    if machine.shm_bytes >= MIN_SHM_BYTES:
        return [Verdict(check="shared memory", value=value)]
    reason = "ranks of a pod exchange data through /dev/shm; with too little of it they fail"
    change = "mount a memory volume at /dev/shm (the operator does), or docker run --shm-size"
    return [Verdict(check="shared memory", value=value, status="broken", reason=reason, change=change)]


def _vectors(machine: Machine) -> list[Verdict]:
    value = f"{', '.join(machine.vectors) or 'none'}; ranks on CPU compute in {machine.dtype}"
    if machine.devices or BF16 in machine.vectors:
        return [Verdict(check="vectors", value=value)]
    reason = "without bf16 arithmetic weights take twice the memory and bandwidth"
    if AVX512 not in machine.vectors and AVX2 not in machine.vectors:
        reason = "the kernels have no vectors of this processor"
    change = "use a processor with AVX-512 BF16 or AMX, or --quantization int8"
    return [Verdict(check="vectors", value=value, status="slow", reason=reason, change=change)]


def _processor_rates(machine: Machine) -> list[Verdict]:
    return [
        Verdict(check="CPU copy rate", value=f"{machine.copy_bytes_per_s / 1e9:.1f} GB/s"),
        Verdict(check="CPU matmul rate", value=f"{machine.matmul_flops_per_s / 1e9:,.0f} GFLOP/s ({machine.dtype})"),
    ]


def _driver(machine: Machine) -> list[Verdict]:
    value = f"driver {machine.driver or 'none'}, torch {machine.torch} for CUDA {machine.cuda or 'none'}"
    if machine.devices or not machine.has_driver_files:
        return [Verdict(check="driver", value=value)]
    reason = "the machine has a driver, but torch finds no device: ranks compute on CPU"
    change = "use a torch for GPUs, a driver that supports its CUDA version, and a container runtime that passes devices"
    return [Verdict(check="driver", value=value, status="broken", reason=reason, change=change)]


def _compiler(machine: Machine) -> list[Verdict]:
    if not machine.devices or machine.can_compile:
        return [Verdict(check="kernels", value="can be compiled")] if machine.devices else []
    reason = "kernels that the image does not have compiled cannot be compiled: ranks compute with torch, the host samples"
    change = "add Triton, a C compiler and Python's headers to the image"
    return [Verdict(check="kernels", value="no compiler", status="slow", reason=reason, change=change)]


def _device(machine: Machine) -> list[Verdict]:
    return [verdict for device in machine.devices for verdict in (_kind(device), *_rates(device), _state(device))]


def _kind(device: Device) -> Verdict:
    major, minor = device.capability
    check, value = f"device {device.index}", f"{device.name}, sm_{major}{minor}, {device.memory_bytes / 2**30:.0f} GiB"
    if major >= 8:
        return Verdict(check=check, value=value)
    change = "use a device of compute capability 8.0 or more"
    return Verdict(check=check, value=value, status="slow", reason="it has no bf16 arithmetic", change=change)


def _rates(device: Device) -> list[Verdict]:
    rates = product_rates(device.name)
    known = (None, None) if rates is None else (rates.copy_bytes_per_s, rates.matmul_flops_per_s)
    measured = (device.copy_bytes_per_s, device.matmul_flops_per_s)
    return [
        _rate(f"device {device.index} {name} rate", value, of_product, unit)
        for name, value, of_product, unit in zip(("copy", "matmul"), measured, known, ("TB/s", "TFLOP/s"), strict=True)
    ]


def _rate(check: str, value: float, of_product: float | None, unit: str) -> Verdict:
    text = f"{value / 1e12:.2f} {unit}"
    if of_product is None:
        return Verdict(check=check, value=f"{text}; this product's is not known")
    text += f", {value / of_product:.0%} of the product's"
    if value >= RATE_SHARE * of_product:
        return Verdict(check=check, value=text)
    change = "stop other programs on the device; check power limit, cooling and clocks (nvidia-smi -q -d PERFORMANCE)"
    return Verdict(check=check, value=text, status="slow", reason="the device is slower than its product", change=change)


def _state(device: Device) -> Verdict:
    check = f"device {device.index} state"
    if device.ecc_uncorrected:
        reason, change = f"{device.ecc_uncorrected} uncorrected ECC errors", "drain the node and reset the device"
        return Verdict(check=check, value="ECC errors", status="broken", reason=reason, change=change)
    reasons = ", ".join(reason for reason in device.throttle if reason != "sw_power_cap")
    if reasons:
        return Verdict(check=check, value="throttled", status="slow", reason=reasons, change="check cooling and power supply")
    return Verdict(check=check, value="no errors, full clocks")


def _together(machine: Machine) -> list[Verdict]:
    """Several devices work together in tensor parallelism."""
    if len(machine.devices) < 2:
        return []
    verdicts = [Verdict(check="NCCL", value=machine.nccl or "none")]
    if not machine.nccl:
        change = "use a build of torch with NCCL"
        verdicts = [Verdict(check="NCCL", value="none", status="broken", reason="ranks cannot communicate", change=change)]
    names = sorted({device.name for device in machine.devices})
    if len(names) > 1:
        change = "select one product: spec.placement.nodeSelector or CUDA_VISIBLE_DEVICES"
        reason = "ranks wait for the slowest device"
        verdicts.append(Verdict(check="products", value=", ".join(names), status="slow", reason=reason, change=change))
    if machine.separated:
        pairs = ", ".join(f"{one}-{other}" for one, other in machine.separated)
        change = "use devices with NVLink, or no virtual machine; pipeline stages communicate less than tensor parallelism"
        reason = "these devices exchange data through host memory"
        verdicts.append(Verdict(check="peer access", value=f"not between {pairs}", status="slow", reason=reason, change=change))
    else:
        verdicts.append(Verdict(check="peer access", value="between all devices"))
    return verdicts


_CHECKS: Sequence[Callable[[Machine], list[Verdict]]] = (
    *(_processors, _memory, _shared_memory, _vectors, _processor_rates),
    *(_driver, _compiler, _device, _together),
)
