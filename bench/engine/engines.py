"""The engines that `versus_transformers` lets take turns: ours over HTTP, and transformers in a process of its own."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.engine.serve import Load, run_load
from bench.frame.programs import Program, cpu_s, end

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one engine did with a set of prompts: tokens per second, and texts (ours) or tokens (transformers)."""

    speed: float
    texts: list[str] | None = None
    tokens: list[list[int]] | None = None


class Engine(Protocol):
    """Something that generates greedily, past the end of sequence."""

    @property
    def name(self) -> str:
        """Program, then maybe a dash and what of it is measured."""
        ...

    def run(self, prompts: Prompts, max_tokens: int) -> Turn:
        """One turn. Raises RuntimeError when an answer is missing or short."""
        ...

    def cpu_s(self) -> float:
        """CPU seconds of its processes so far."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """A server asked over HTTP, all prompts at once. With `decode_only` the speed is that of one stream after its first token."""

    name: str
    program: Program
    model: str
    decode_only: bool = False

    def run(self, prompts: Prompts, max_tokens: int) -> Turn:
        """One turn of requests."""
        bodies = [self._body(prompt, max_tokens) for prompt in prompts]
        answers, seconds = asyncio.run(run_load(Load(f"{self.program.base_url}/v1/completions", bodies, len(bodies))))
        for answer in answers:
            if answer.error is not None or answer.completion_tokens != max_tokens:
                raise RuntimeError(f"{self.name}: {answer.error or f'{answer.completion_tokens} tokens of {max_tokens}'}")
        tpot_s = answers[0].tpot_s
        if not self.decode_only or tpot_s is None:
            return Turn(len(prompts) * max_tokens / seconds, texts=[answer.text for answer in answers])
        return Turn(1 / tpot_s, texts=[answer.text for answer in answers])

    def cpu_s(self) -> float:
        """CPU seconds of the server and its ranks."""
        return self.program.cpu_s()

    def _body(self, prompt: list[int], max_tokens: int) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class Worker:
    """The process of `bench.engine.transformers_worker`."""

    process: subprocess.Popen[str]

    def call(self, op: str, prompts: Prompts, max_tokens: int) -> dict[str, object]:
        """The answer to one command. Raises RuntimeError when the process is gone."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, "prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the transformers worker left with {self.process.wait()} during {op}")
        answer: dict[str, object] = json.loads(line)
        return answer

    def gaps(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """For each token: gap of the two best logits before it, in standard deviations."""
        gaps = self.call("gaps", [prompt + tokens], len(tokens))["gaps"]
        assert isinstance(gaps, list)
        return gaps


@dataclass(frozen=True, slots=True)
class Generate:
    """`generate` of transformers: `op` is one_by_one, batch, or decode (one stream after its first token)."""

    name: str
    worker: Worker
    op: str

    def run(self, prompts: Prompts, max_tokens: int) -> Turn:
        """One turn."""
        answer = self.worker.call(self.op, prompts, max_tokens)
        tokens = answer["tokens"]
        assert isinstance(tokens, list)
        if self.op == "decode":
            return Turn(1 / float(str(answer["seconds_per_token"])), tokens=tokens)
        return Turn(len(prompts) * max_tokens / float(str(answer["seconds"])), tokens=tokens)

    def cpu_s(self) -> float:
        """CPU seconds of the process."""
        return cpu_s(self.worker.process.pid)


@contextmanager
def running_worker(folder: Path, dtype: str, threads: int, log: Path) -> Iterator[Worker]:
    """transformers, loaded and waiting; ended afterwards. Raises RuntimeError when it cannot load."""
    command = [sys.executable, "-m", "bench.engine.transformers_worker", str(folder), "--dtype", dtype, "--threads", str(threads)]
    with open(log, "w") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the transformers worker left with {process.wait()}:\n{log.read_text()[-3000:]}")
        yield Worker(process)
    finally:
        end(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
