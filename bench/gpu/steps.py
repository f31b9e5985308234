"""Measures decode and prefill of whole models through engine loop and runner, and how well steps fill the device.

    period  mean time between the ends of consecutive decode steps, as the engine sees them
    work    time of the step's captured kernels alone, replayed without the host
    gap     period - work: everything between the kernels of two steps, the update of the rows and the copy of tokens included
    busy    work / period

The work is that of the graph, for eager steps too: their gap is what the host costs.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from bench.gpu.bounds import DECODE_SHARES, MAX_GAP_US, MIN_BUSY, PREFILL_SHARE, Figure, small_bound
from bench.gpu.clock import Clock, profiled_busy
from bench.gpu.engine_run import Engine, Load, Mode, Step, Window, open_runner
from bench.gpu.random_model import LoadedModel, load_random
from bench.gpu.roofline import kernels, predict_decode, predict_prefill
from bench.gpu.sizes import Sizes
from phalanx_api.roofline import DeviceRates, ModelShape, shape_of
from phalanx_runtime.rank.device.device_step import DeviceStep
from phalanx_runtime.rank.runner import ModelRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The device, its rates and the sizes."""

    device: torch.device
    clock: Clock
    rates: DeviceRates
    sizes: Sizes
    decoded: dict[tuple[str, int], float] = field(default_factory=dict)
    """Tokens per second that our engine decodes, by model and batch size, for comparisons."""


def release() -> None:
    """Frees what the last part left."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def large_model(bench: Bench) -> Iterator[Figure]:
    """Decode at each batch size, graphs against eager steps, and prefill, of the large model."""
    sizes = bench.sizes
    rows = max(sizes.batches)
    model = load_random(sizes.large, rows * tokens_of(sizes), bench.device, sizes)
    runner = open_runner(model, "graphs", rows)
    yield from _captures(runner)
    for batch in sizes.batches:
        yield from large_decode(bench, runner, batch)
    if sizes.compares_large:
        yield from _compared(bench, model, runner, sizes.compared_batch)
    yield from large_prefill(bench, runner)


def small_model(bench: Bench) -> Iterator[Figure]:
    """Decode of one request of the small model, and graphs against eager steps."""
    sizes = bench.sizes
    model = load_random(sizes.small, 2 * tokens_of(sizes), bench.device, sizes)
    runner = open_runner(model, "graphs", 1)
    shape, window = shape_of(sizes.small), open_window(runner, sizes, 1)
    predicted = predict_decode(shape, bench.rates, 1, round(window.context))
    bench.decoded["small", 1] = 1 / window.period_s
    yield Figure(
        name="decode 1",
        value=1 / window.period_s,
        unit="tok/s",
        bound=sizes.bound(small_bound(bench.rates.copy_bytes_per_s)),
        predicted=1 / predicted.seconds,
    )
    yield from _compared(bench, model, runner, 1)


def tokens_of(sizes: Sizes) -> int:
    """Tokens of the longest request: context, measured steps, and steps in which other prompts are computed."""
    return sizes.context + max(sizes.batches) // 2 + sizes.decode_steps + 64


def open_window(runner: ModelRunner, sizes: Sizes, batch: int, lag: int = 1) -> Window:
    """Returns decode steps with a mean context of about `sizes.context`."""
    prompt = max(1, sizes.context - sizes.decode_steps // 2)
    load = Load(
        batch=batch, prompt=prompt, max_tokens=tokens_of(sizes) - prompt, step_tokens=sizes.step_tokens, lag=lag, seed=lag
    )
    return Engine(runner, load).decode(sizes.decode_steps, sizes.warm_steps)


def graph_s(bench: Bench, runner: ModelRunner, batch: int) -> float:
    """Returns the seconds of the kernels of the latest decode step, replayed. Raises RuntimeError if no graph has its size."""
    step = runner.device_step
    if not isinstance(step, DeviceStep) or step.graphs.size_for(batch) != batch:
        raise RuntimeError(f"no captured step of {batch} requests")
    bench.clock.synchronize()
    with torch.inference_mode():
        return bench.clock.queued_s(lambda: step.graphs.run(batch), bench.sizes.replays)


def large_decode(bench: Bench, runner: ModelRunner, batch: int) -> Iterator[Figure]:
    """Rate, share of the copy rate, gap and busy share of graphs with lag 1."""
    rates, sizes, shape = bench.rates, bench.sizes, shape_of(bench.sizes.large)
    window = open_window(runner, sizes, batch)
    work_s = graph_s(bench, runner, batch)
    predicted = predict_decode(shape, rates, batch, round(window.context / batch))
    ideal_s = ideal_decode_s(shape, rates, window.context)
    bench.decoded["large", batch] = batch / window.period_s
    yield Figure(name=f"decode {batch}", value=batch / window.period_s, unit="tok/s", predicted=batch / predicted.seconds)
    yield Figure(
        name=f"decode {batch}, of the copy rate",
        value=ideal_s / window.period_s,
        unit="share",
        bound=sizes.bound(DECODE_SHARES.get(batch, 0.0)),
        predicted=predicted.share,
    )
    yield Figure(name=f"decode {batch}, kernels alone, of the copy rate", value=ideal_s / work_s, unit="share")
    yield Figure(name=f"decode {batch}, p99 of a step", value=1e3 * window.p99_s, unit="ms", predicted=1e3 * predicted.seconds)
    yield from _fill(f"decode {batch}", window, work_s, sizes, is_bounded=True)


def ideal_decode_s(shape: ModelShape, rates: DeviceRates, context: float) -> float:
    """Returns the time in which weights and the KV cache of `context` tokens are read once at the copy rate."""
    num_bytes = shape.linear_weights * shape.bytes_per_number + context * shape.kv_bytes_per_token
    return num_bytes / rates.copy_bytes_per_s


def _fill(name: str, window: Window, work_s: float, sizes: Sizes, is_bounded: bool) -> Iterator[Figure]:
    gap_us, busy = 1e6 * (window.period_s - work_s), work_s / window.period_s
    bounds = (sizes.bound(MAX_GAP_US), sizes.bound(MIN_BUSY)) if is_bounded else (None, None)
    yield Figure(name=f"{name}, gap between steps", value=gap_us, unit="us", bound=bounds[0], is_least=False, predicted=0.0)
    yield Figure(name=f"{name}, device busy", value=busy, unit="share", bound=bounds[1], predicted=1.0)


def _compared(bench: Bench, model: LoadedModel, graphs: ModelRunner, batch: int) -> Iterator[Figure]:
    """Graphs and eager steps with lag 0 and 1, without bounds, and the busy share by the profiler."""
    sizes, modes = bench.sizes, dict[Mode, ModelRunner](graphs=graphs, eager=open_runner(model, "eager", batch))
    open_window(graphs, sizes, batch)
    work_s = graph_s(bench, graphs, batch)
    for mode, runner in modes.items():
        for lag in (0, 1):
            window, name = open_window(runner, sizes, batch, lag), f"{mode}, lag {lag}, decode {batch}"
            yield Figure(name=name, value=batch / window.period_s, unit="tok/s")
            yield from _fill(name, window, work_s, sizes, is_bounded=False)
    if sizes.profiled_steps:
        yield Figure(name=f"graphs, decode {batch}, busy by the profiler", value=_profiled(bench, graphs, batch), unit="share")


def _profiled(bench: Bench, runner: ModelRunner, batch: int) -> float:
    sizes = bench.sizes
    prompt = max(1, sizes.context - sizes.profiled_steps)
    load = Load(batch=batch, prompt=prompt, max_tokens=tokens_of(sizes) - prompt, step_tokens=sizes.step_tokens, seed=7)
    engine = Engine(runner, load)
    engine.run_until(lambda steps: bool(steps) and steps[-1].is_decode and steps[-1].num_rows == batch)
    first = len(engine.runner.steps)
    share = profiled_busy(lambda: engine.run_until(lambda steps: len(steps) >= first + sizes.profiled_steps), bench.device)
    engine.runner.drain()
    return share


def large_prefill(bench: Bench, runner: ModelRunner) -> Iterator[Figure]:
    """Prompts one after another: the fastest step of a whole prompt, from its start to its first token."""
    sizes, shape, rates = bench.sizes, shape_of(bench.sizes.large), bench.rates
    steps = list[Step]()
    for seed in range(sizes.prefills):
        load = Load(batch=1, prompt=sizes.prefill, max_tokens=1, step_tokens=sizes.prefill, lag=0, seed=100 + seed)
        steps += Engine(runner, load).run()
    seconds = min(step.ended - step.started for step in steps if step.num_tokens == sizes.prefill)
    predicted = predict_prefill(shape, rates, sizes.prefill)
    yield Figure(
        name=f"prefill {sizes.prefill}", value=sizes.prefill / seconds, unit="tok/s", predicted=sizes.prefill / predicted.seconds
    )
    yield Figure(
        name=f"prefill {sizes.prefill}, of the matmul rate",
        value=prefill_flops(shape, sizes.prefill) / rates.matmul_flops_per_s / seconds,
        unit="share",
        bound=sizes.bound(PREFILL_SHARE),
        predicted=predicted.share,
    )


def prefill_flops(shape: ModelShape, tokens: int) -> float:
    """Returns the FLOPs of one prompt: linears, causal attention, and the head of its last token."""
    return sum(part.flops for part in kernels(shape, tokens, range(1, tokens + 1), 1))


def _captures(runner: ModelRunner) -> Iterator[Figure]:
    step = runner.device_step
    if isinstance(step, DeviceStep):
        yield Figure(name="captured sizes", value=len(step.account.captured))
        yield Figure(name="captures", value=step.account.seconds, unit="s")
        yield Figure(name="memory of graphs", value=step.account.num_bytes / (1 << 20), unit="MiB")
