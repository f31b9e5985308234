"""`phalanx-runtime bench URL`: measures a server at one or several rates, and prints tables."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from phalanx_runtime.commands import BenchSettings
from phalanx_runtime.terminal.conversation import ChatError
from phalanx_runtime.terminal.figures import Answer, Objectives, format_figures, goodput, measure, samples_ms, table
from phalanx_runtime.terminal.load import LoadPlan, run_load, texts
from phalanx_runtime.terminal.plot import Panel, draw, to_png, to_svg
from phalanx_runtime.terminal.remote import RemoteModel, api_base

CLOSED_CONCURRENCY = 16
"""Requests in flight without a rate and a bound."""
PANELS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL"}


@dataclass(frozen=True, slots=True)
class Trial:
    """A measurement at one rate."""

    rate: float
    answers: Sequence[Answer]
    figures: dict[str, Any]


def bench(settings: BenchSettings) -> int:
    """Prints the figures. Returns the exit code: 1 if a request failed or a file cannot be written."""
    try:
        remote = RemoteModel(settings.url, settings.model, settings.api_key)
        remote.close()
        trials = asyncio.run(_measure_all(settings, remote.name))
        for trial in trials:
            print(f"\nrate: {_rate(trial.rate)}\n\n{format_figures(trial.figures)}")
        if len(trials) > 1:
            print(f"\n{_comparison(trials)}")
        _write(settings, remote.name, trials)
    except (ChatError, OSError) as error:
        print(f"phalanx-runtime bench: {error}", file=sys.stderr)
        return 1
    failures = sorted({reason for trial in trials for reason in trial.figures["errors"]})
    for reason in failures:
        print(f"phalanx-runtime bench: failed: {reason}", file=sys.stderr)
    return 1 if failures else 0


async def _measure_all(settings: BenchSettings, model: str) -> list[Trial]:
    """Each trial has prompts of its own: none is in the prefix cache because of an earlier trial."""
    warmup = request_bodies(settings, model, settings.num_warmups, settings.seed)
    await run_load(_load(settings, warmup, settings.request_rate[0]))
    trials = []
    for number, rate in enumerate(settings.request_rate):
        bodies = request_bodies(settings, model, settings.num_prompts, settings.seed + 1 + number)
        answers, duration_s = await run_load(_load(settings, bodies, rate))
        figures = measure(answers, duration_s)
        objectives = Objectives(ttft_ms=settings.slo_ttft_ms, itl_ms=settings.slo_itl_ms)
        if objectives != Objectives():
            figures["goodput_requests_per_s"] = goodput(answers, duration_s, objectives)
        trials.append(Trial(rate, answers, figures))
    return trials


def _load(settings: BenchSettings, bodies: list[dict[str, object]], rate: float) -> LoadPlan:
    path = "chat/completions" if settings.endpoint == "chat" else "completions"
    is_closed = rate == float("inf") and settings.max_concurrency is None
    return LoadPlan(
        url=f"{api_base(settings.url)}/{path}",
        bodies=bodies,
        api_key=settings.api_key,
        rate=rate,
        concurrency=CLOSED_CONCURRENCY if is_closed else settings.max_concurrency,
        seed=settings.seed,
    )


def request_bodies(settings: BenchSettings, model: str, count: int, seed: int) -> list[dict[str, object]]:
    """Returns seeded requests, all different."""
    common: dict[str, object] = {
        "model": model,
        "max_tokens": settings.output_len,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        common["ignore_eos"] = True
    prompts = texts(seed, count, settings.input_len, settings.input_len)
    if settings.endpoint == "chat":
        return [common | {"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    return [common | {"prompt": prompt} for prompt in prompts]


def _comparison(trials: Sequence[Trial]) -> str:
    columns = ["rate", "requests/s", "output tokens/s", "goodput", "TTFT p50", "TTFT p99", "TPOT p50", "ITL p50", "ITL p99"]
    rows = []
    for trial in trials:
        figures = trial.figures
        times = [figures[name][share] for name, share in _COMPARED]
        good = figures.get("goodput_requests_per_s")
        shown = [figures["requests_per_s"], figures["output_tokens_per_s"], good, *times]
        rows.append([_rate(trial.rate), *("" if value is None else f"{value:,.2f}" for value in shown)])
    return table(columns, rows)


_COMPARED = [("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("itl_ms", "p50"), ("itl_ms", "p99")]


def _rate(rate: float) -> str:
    return "unlimited" if rate == float("inf") else f"{rate:g}/s"


def _write(settings: BenchSettings, model: str, trials: Sequence[Trial]) -> None:
    """Raises OSError."""
    if settings.json is not None:
        own = {name: value for name, value in asdict(settings).items() if name not in ("api_key", "json", "plot")}
        own |= {"model": model, "request_rate": [_rate(rate) for rate in settings.request_rate]}
        runs = [{"request_rate": _rate(trial.rate), **trial.figures} for trial in trials]
        figures = msgspec.json.encode({"settings": own, "runs": runs})  # NaN, of no sample, is null
        settings.json.write_bytes(msgspec.json.format(figures, indent=2) + b"\n")
    if settings.plot is not None:
        samples = {_rate(trial.rate): samples_ms(trial.answers) for trial in trials}
        panels = [Panel(title, {rate: times[name] for rate, times in samples.items()}) for name, title in PANELS.items()]
        drawing = draw(panels)
        if settings.plot.suffix == ".svg":
            settings.plot.write_text(to_svg(drawing))
        else:
            settings.plot.write_bytes(to_png(drawing))
