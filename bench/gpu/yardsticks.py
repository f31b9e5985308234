"""Measures the rates of a device that all shares refer to: a large copy, and a large bf16 matrix product."""

import torch

from bench.gpu.bounds import Figure
from bench.gpu.clock import Clock
from bench.gpu.sizes import Sizes
from phalanx_api.roofline import DeviceRates

COPIES = 8
"""Queued at once, not captured: copies in a graph have four fifths of the rate on an H100."""


def measure_device(device: torch.device, clock: Clock, sizes: Sizes) -> DeviceRates:
    """Returns the device with its measured rates. A copied byte counts twice: read and written."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return DeviceRates(
        name=name,
        copy_bytes_per_s=_copy_rate(device, clock, sizes.copy_bytes),
        matmul_flops_per_s=_matmul_rate(device, clock, sizes),
    )


def figures(device: DeviceRates) -> list[Figure]:
    """Returns the rates as figures."""
    return [
        Figure(name="copy rate", value=device.copy_bytes_per_s / 1e12, unit="TB/s"),
        Figure(name="matmul rate, bf16", value=device.matmul_flops_per_s / 1e12, unit="TFLOP/s"),
    ]


def _copy_rate(device: torch.device, clock: Clock, num_bytes: int) -> float:
    source = torch.empty(num_bytes // 4, device=device).normal_()
    target = torch.empty_like(source)
    clock.queued_s(lambda: target.copy_(source), COPIES)
    return 2 * source.nbytes / clock.queued_s(lambda: target.copy_(source), COPIES)


def _matmul_rate(device: torch.device, clock: Clock, sizes: Sizes) -> float:
    size = sizes.matmul_size
    left, right = (torch.empty(size, size, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
    target = torch.empty_like(left)
    return 2.0 * size**3 / clock.captured_s(lambda: torch.mm(left, right.T, out=target))
