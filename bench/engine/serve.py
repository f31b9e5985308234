"""Measures TTFT, TPOT, ITL, end-to-end time and throughput of any OpenAI-compatible URL.

    python -m bench.engine.serve --base-url http://127.0.0.1:8000 --model NAME --concurrency 16 --num-requests 64

TTFT: sending to first token. TPOT: mean time per later token of one request. ITL: gap between two events of one request. Prompts
are seeded and all different. Exits with 1 if a request failed.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from bench.frame.client import Answer, session_for, stream_answer
from bench.frame.workload import texts
from phalanx_runtime.terminal.figures import format_figures as format_figures
from phalanx_runtime.terminal.figures import measure as measure


@dataclass(frozen=True, slots=True)
class Load:
    url: str
    bodies: list[dict[str, object]]
    concurrency: int
    api_key: str | None = None
    timeout_s: float | None = 600.0  # per request
    is_kept_alive: bool = True


async def run_load(load: Load) -> tuple[list[Answer], float]:
    """Returns all answers in request order, and the seconds from the first request to the last answer."""
    pending = list(reversed(list(enumerate(load.bodies))))
    answers: dict[int, Answer] = {}

    async with session_for(load.concurrency, load.api_key, load.timeout_s, load.is_kept_alive) as session:

        async def worker() -> None:
            while pending:
                index, body = pending.pop()
                answers[index] = await stream_answer(session, load.url, body)

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(load.concurrency)))
        duration_s = time.perf_counter() - started
    return [answers[index] for index in range(len(load.bodies))], duration_s


def body_of(args: argparse.Namespace, prompt: str) -> dict[str, object]:
    body: dict[str, object] = {
        "model": args.model,
        "max_tokens": args.output_len,
        "temperature": args.temperature,
        "seed": args.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.ignore_eos:
        body["ignore_eos"] = True
    if args.endpoint == "chat":
        return body | {"messages": [{"role": "user", "content": prompt}]}
    return body | {"prompt": prompt}


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="python -m bench.engine.serve", description="Measure an OpenAI-compatible URL.")
    flags.add_argument("--base-url", required=True, help="for example http://127.0.0.1:8000 (/v1 is added)")
    flags.add_argument("--model", required=True, help="the served model's name")
    flags.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    flags.add_argument("--concurrency", type=_positive, default=16, help="requests in flight at any time")
    flags.add_argument("--num-requests", type=_positive, default=64)
    flags.add_argument("--warmup", type=int, default=2, help="requests before the measurement")
    flags.add_argument("--input-len", type=_positive, default=128, help="words of the longest prompt, about as many tokens")
    flags.add_argument("--input-len-min", type=_positive, default=None, help="words of the shortest prompt; default: --input-len")
    flags.add_argument("--shared-prefix-len", type=int, default=0, help="words of a common prefix of all prompts")
    flags.add_argument("--output-len", type=_positive, default=64, help="maximum tokens of an answer")
    flags.add_argument("--ignore-eos", action="store_true", help="make every answer as long as --output-len")
    flags.add_argument("--temperature", type=float, default=0.0)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--api-key", default=None)
    flags.add_argument("--timeout-s", type=float, default=600.0, help="timeout of one request")
    flags.add_argument("--json", type=Path, default=None, help="file for the figures as JSON")
    return flags


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


async def run(args: argparse.Namespace) -> dict[str, object]:
    base = args.base_url.rstrip("/").removesuffix("/v1")
    url = f"{base}/v1/{'chat/completions' if args.endpoint == 'chat' else 'completions'}"
    shortest = min(args.input_len_min or args.input_len, args.input_len)
    prompts = texts(args.seed, args.warmup + args.num_requests, shortest, args.input_len)
    shared = texts(args.seed + 1, 1, args.shared_prefix_len, args.shared_prefix_len)[0]
    bodies = [body_of(args, f"{shared} {prompt}".lstrip()) for prompt in prompts]
    if args.warmup:
        await run_load(Load(url, bodies[: args.warmup], args.concurrency, args.api_key, args.timeout_s))
    load = Load(url, bodies[args.warmup :], args.concurrency, args.api_key, args.timeout_s)
    return measure(*await run_load(load))


Measure = Callable[[argparse.Namespace], Coroutine[None, None, dict[str, object]]]


def main(argv: list[str] | None = None, measure: Measure = run) -> int:
    args = parser().parse_args(argv)
    figures = asyncio.run(measure(args))
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "api_key")}
    if args.json is not None:
        args.json.write_text(json.dumps({"settings": settings, "figures": figures}, indent=2) + "\n")
    print(format_figures(figures))
    errors = figures["errors"]
    if isinstance(errors, list) and errors:
        print("\n".join(f"failed: {error}" for error in errors), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
