"""Kernels of whole steps by their time, from torch's profiler: where a step of the large model spends it."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu.bounds import Figure
from bench.gpu.engine_run import Engine, Load, open_runner
from bench.gpu.random_model import load_random
from bench.gpu.steps import Bench, open_window, tokens_of
from phalanx_runtime.rank.device.device_step import DeviceStep

NUM_KERNELS = 12
"""Of a step, the longest first."""
STEPS = 5


def profile_figures(bench: Bench) -> Iterator[Figure]:
    """Time of each kernel in a step, by name: decode at each batch size, and a prompt. Nothing without a GPU."""
    if bench.device.type != "cuda":
        return
    sizes, rows = bench.sizes, max(bench.sizes.batches)
    runner = open_runner(load_random(sizes.large, rows * tokens_of(sizes), bench.device, sizes), "graphs", rows)
    step = runner.device_step
    assert isinstance(step, DeviceStep)
    for batch in sizes.batches:
        open_window(runner, sizes, batch)
        with torch.inference_mode():
            times = kernel_times(lambda batch=batch: [step.graphs.run(batch) for _ in range(STEPS)])  # type: ignore[misc]
        yield from _figures(f"decode {batch}", times, STEPS)
    for seed in range(2):  # the first one loads what the second one uses
        load = Load(batch=1, prompt=sizes.prefill, max_tokens=1, step_tokens=sizes.prefill, lag=0, seed=seed)
        times = kernel_times(lambda load=load: Engine(runner, load).run())  # type: ignore[misc]
    yield from _figures(f"prefill {sizes.prefill}", times, 1)


def kernel_times(work: Callable[[], object]) -> Counter[str]:
    """Returns the microseconds of all kernels and copies by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        work()
        torch.cuda.synchronize()
    events: Any = trace.events()
    found = Counter[str]()
    for one in events:
        if one.device_type.name == "CUDA":
            found[one.name] += one.time_range.end - one.time_range.start
    return found


def _figures(step: str, times: Counter[str], count: int) -> Iterator[Figure]:
    yield Figure(name=f"{step}, all kernels", value=times.total() / count, unit="us")
    for name, us in times.most_common(NUM_KERNELS):
        yield Figure(name=f"{step}, {name[:48]}", value=us / count, unit="us")
