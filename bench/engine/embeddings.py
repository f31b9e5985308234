"""Measures `/v1/embeddings` of a runtime: one input per request, a batch, and a batch beside streams that decode.

    python -m bench.engine.embeddings [--model FOLDER] [--inputs 24] [--input-len 64] [--streams 8] [--output-len 48] [--pairs 7]

A round runs four parts, each alone at the runtime, in an order that rotates: the inputs one after another in requests of their
own; all inputs in one request; the streams alone; the batch and the streams at once. The model has by default the shape of
SmolLM2-135M, random weights, and mean pooling. Reported are medians of elapsed time and of the CPU time of the runtime with its
rank, and ratios of pairs: one by one over batch, and batch and streams one after the other over both at once; over 1 means that
the latter is faster. Intervals are of 95 %. Exits with 1 if tokens or vectors differ between the parts: streams are greedy, and
two vectors of an input have a cosine of at least 0.999.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from bench.frame.client import session_for, stream_answer
from bench.frame.figures import markdown_header, markdown_row, median_interval
from bench.frame.programs import Program, running
from bench.frame.workload import token_ids
from bench.peers.checkpoint import checkpoint

SINGLE, BATCH, STREAMS, BOTH = "one by one", "batch", "streams", "batch and streams"
PARTS = (SINGLE, BATCH, STREAMS, BOTH)
LEAST_COSINE = 0.999


@dataclass(slots=True)
class Part:
    """Measurements of one part, one per round."""

    elapsed_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Between tokens of the streams, of all rounds."""


@dataclass(slots=True)
class Server:
    """A runtime with the inputs and prompts that it gets."""

    program: Program
    session: aiohttp.ClientSession
    inputs: list[list[int]]
    prompts: list[list[int]]
    output_len: int
    vectors: list[np.ndarray] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)
    """Of each part with streams."""

    async def embed(self, inputs: Sequence[list[int]]) -> np.ndarray:
        """Returns the vectors of one request."""
        url = f"{self.program.base_url}/v1/embeddings"
        async with self.session.post(url, json={"model": "bench", "input": inputs}) as response:
            response.raise_for_status()
            return np.array([one["embedding"] for one in (await response.json())["data"]])

    async def run(self, name: str, part: Part) -> None:
        """Runs a part once and adds its measurements."""
        cpu_s, started = self.program.cpu_s(), time.perf_counter()
        if name == SINGLE:
            self.vectors.append(np.concatenate([await self.embed([one]) for one in self.inputs]))
        elif name == BATCH:
            self.vectors.append(await self.embed(self.inputs))
        elif name == STREAMS:
            part.gaps_s += await self._stream()
        else:
            vectors, gaps_s = await asyncio.gather(self.embed(self.inputs), self._stream())
            self.vectors.append(vectors)
            part.gaps_s += gaps_s
        part.elapsed_s.append(time.perf_counter() - started)
        part.cpu_s.append(self.program.cpu_s() - cpu_s)

    async def _stream(self) -> list[float]:
        """Runs all streams at once; returns the times between tokens."""
        body = {"model": "bench", "max_tokens": self.output_len, "temperature": 0, "ignore_eos": True, "stream": True}
        url = f"{self.program.base_url}/v1/completions"
        answers = await asyncio.gather(*(stream_answer(self.session, url, body | {"prompt": one}) for one in self.prompts))
        if failed := [answer.error for answer in answers if answer.error]:
            raise SystemExit(f"a stream failed: {failed[0]}")
        self.texts.append([answer.text for answer in answers])
        return [gap for answer in answers for gap in answer.gaps_s]

    def least_cosine(self) -> float:
        """Returns the smallest cosine of two vectors of one input, the first part's and another one's."""
        return min(float((self.vectors[0] * other).sum(1).min()) for other in self.vectors)

    def equal_texts(self) -> int:
        """Returns how many streams had the text of their first part in every part."""
        return sum(len(set(texts)) == 1 for texts in zip(*self.texts, strict=True))


async def measure(server: Server, pairs: int) -> dict[str, Part]:
    """Returns the measurements of the parts; the first round is not measured."""
    parts = {name: Part() for name in PARTS}
    for turn in range(pairs + 1):
        if turn == 1:
            parts = {name: Part() for name in PARTS}
        first = turn % len(PARTS)
        for name in (*PARTS[first:], *PARTS[:first]):
            await server.run(name, parts[name])
    return parts


def report(parts: dict[str, Part]) -> str:
    """Returns both tables in Markdown."""
    lines = [markdown_header(["part", "elapsed, s", "CPU, s", "time between tokens p50, ms"])]
    for name, part in parts.items():
        gap = f"{1000 * statistics.median(part.gaps_s):.1f}" if part.gaps_s else ""
        lines.append(markdown_row([name, *(f"{statistics.median(some):.2f}" for some in (part.elapsed_s, part.cpu_s)), gap]))
    lines += ["", markdown_header(["ratio", "elapsed", "95 % interval", "CPU", "95 % interval"])]
    for text, apart, together in (
        (f"{SINGLE} / {BATCH}", (SINGLE,), BATCH),
        ("one after the other / at once", (BATCH, STREAMS), BOTH),
    ):
        cells = []
        for kind in ("elapsed_s", "cpu_s"):
            sums = [sum(some) for some in zip(*(getattr(parts[name], kind) for name in apart), strict=True)]
            ratio = median_interval([a / b for a, b in zip(sums, getattr(parts[together], kind), strict=True)])
            cells += [f"{ratio.middle:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}"]
        lines.append(markdown_row([text, *cells]))
    return "\n".join(lines)


async def run(program: Program, model: Path, args: argparse.Namespace) -> int:
    """Prints the tables. Returns the exit status."""
    inputs = token_ids(model, 1, [args.input_len] * args.inputs)
    prompts = token_ids(model, 2, [16] * args.streams)
    async with session_for(args.streams + 1, None, None) as session:
        server = Server(program, session, inputs, prompts, args.output_len)
        print(report(await measure(server, args.pairs)))
    cosine, equal = server.least_cosine(), server.equal_texts()
    print(
        f"{equal} of {args.streams} streams have equal texts in all parts; the least cosine of an input's vectors is {cosine:.5f}"
    )
    return 0 if equal == args.streams and cosine >= LEAST_COSINE else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--inputs", type=int, default=24)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args(arguments)
    model = args.model or checkpoint()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["serve", str(model), "--served-model-name", "bench", "--kv-cache-memory-bytes", str(1 << 28)]
        with running("runtime", "phalanx_runtime", flags, Path(folder)) as program:
            return asyncio.run(run(program, model, args))


if __name__ == "__main__":
    sys.exit(main())
